"""See `vllm`."""


class ModelConfig:
    """Named, never made."""
