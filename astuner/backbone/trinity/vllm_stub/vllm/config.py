"""Stub; see `vllm`."""


class ModelConfig:
    """Stub; imported, never instantiated."""
