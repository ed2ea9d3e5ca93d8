"""Stands in for vLLM where it never samples: only what Trinity's modules name when they are imported."""
