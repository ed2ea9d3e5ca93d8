"""The model in training and its faces."""

from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall, load_tokenizer
from astuner.model_tuner.tuner import CallSettings, ChatAnswer, ModelTuner

__all__ = [
    "CallSettings",
    "ChatAnswer",
    "ChatCodec",
    "ModelTuner",
    "ParsedAnswer",
    "ToolCall",
    "load_tokenizer",
]
