"""The embedded inference engine: in-process sampling in plain PyTorch, for CPUs, CI and small models."""

from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.embedded.scheduler import EngineStats

__all__ = ["EmbeddedEngine", "EngineStats"]
