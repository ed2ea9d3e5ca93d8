"""Stub; see `vllm`."""
