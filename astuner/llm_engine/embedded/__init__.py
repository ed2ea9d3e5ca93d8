"""Sampling in process, in plain PyTorch: the engine for CPUs, for CI and for small models."""

from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.embedded.scheduler import EngineStats

__all__ = ["EmbeddedEngine", "EngineStats"]
