"""The model in training and its faces."""

from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall, first_line, load_tokenizer
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.model_tuner.tuner import AgentModel, CallSettings, ChatAnswer, ModelTuner

__all__ = [
    "AgentModel",
    "CallSettings",
    "ChatAnswer",
    "ChatCodec",
    "FrozenModel",
    "ModelTuner",
    "ParsedAnswer",
    "Targets",
    "ToolCall",
    "first_line",
    "load_tokenizer",
]
