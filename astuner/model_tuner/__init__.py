"""The chat model that is trained: rendering, sampling, parsing and recording of its calls."""

from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall, load_tokenizer
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.model_tuner.tool_parsers import TOOL_PARSER_NAMES
from astuner.model_tuner.tuner import AgentModel, CallSettings, ChatAnswer, ModelTuner

__all__ = [
    "TOOL_PARSER_NAMES",
    "AgentModel",
    "CallSettings",
    "ChatAnswer",
    "ChatCodec",
    "FrozenModel",
    "ModelTuner",
    "ParsedAnswer",
    "Targets",
    "ToolCall",
    "load_tokenizer",
]
