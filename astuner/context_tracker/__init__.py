"""Converts the LLM calls of an episode to training samples: pure functions without I/O or PyTorch."""
