"""Rows of samples in micro-batches, and attention for them."""
