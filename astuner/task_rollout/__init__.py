"""Runs batches of episodes and computes their statistics."""
