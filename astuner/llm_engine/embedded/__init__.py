"""The embedded inference engine: in-process sampling in plain PyTorch, for CPUs, CI and small models."""
