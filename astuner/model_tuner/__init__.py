"""The model in training and its faces."""

from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall, first_line, load_tokenizer
from astuner.model_tuner.tuner import CallSettings, ChatAnswer, ModelTuner

__all__ = [
    "CallSettings",
    "ChatAnswer",
    "ChatCodec",
    "ModelTuner",
    "ParsedAnswer",
    "ToolCall",
    "first_line",
    "load_tokenizer",
]
