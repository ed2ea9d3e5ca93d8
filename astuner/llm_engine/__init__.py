"""Inference engines, which take token ids and return token ids with their logprobs."""
