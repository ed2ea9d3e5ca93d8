"""Backbones: what runs episodes and moves weights. Each loads lazily, by name."""
