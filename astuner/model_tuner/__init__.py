"""The chat model that is trained: rendering, sampling, parsing and recording of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.doors import lazy_names

if TYPE_CHECKING:
    from astuner.model_tuner.answers import ChatAnswer
    from astuner.model_tuner.chat_options import SAMPLING_PARAMETERS, CallSettings, ChatOptions
    from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall, load_tokenizer
    from astuner.model_tuner.framework_adapters import AgentModel, OpenAiEndpoint
    from astuner.model_tuner.history import HistoryEdit
    from astuner.model_tuner.targets import AUTO_AGENT, DEFAULT_TARGET, FrozenModel, Targets
    from astuner.model_tuner.tool_parsers import TOOL_PARSER_NAMES
    from astuner.model_tuner.tuner import ModelTuner

__all__ = [
    "AUTO_AGENT",
    "DEFAULT_TARGET",
    "SAMPLING_PARAMETERS",
    "TOOL_PARSER_NAMES",
    "AgentModel",
    "CallSettings",
    "ChatAnswer",
    "ChatCodec",
    "ChatOptions",
    "FrozenModel",
    "HistoryEdit",
    "ModelTuner",
    "OpenAiEndpoint",
    "ParsedAnswer",
    "Targets",
    "ToolCall",
    "load_tokenizer",
]

# The process that has the engine renders prompts, and only those that run episodes call the model.
__getattr__ = lazy_names(
    __name__,
    {
        "ChatAnswer": "astuner.model_tuner.answers",
        "HistoryEdit": "astuner.model_tuner.history",
        "ModelTuner": "astuner.model_tuner.tuner",
        "TOOL_PARSER_NAMES": "astuner.model_tuner.tool_parsers",
        **dict.fromkeys(("SAMPLING_PARAMETERS", "CallSettings", "ChatOptions"), "astuner.model_tuner.chat_options"),
        **dict.fromkeys(("ChatCodec", "ParsedAnswer", "ToolCall", "load_tokenizer"), "astuner.model_tuner.codec"),
        **dict.fromkeys(("AgentModel", "OpenAiEndpoint"), "astuner.model_tuner.framework_adapters"),
        **dict.fromkeys(("AUTO_AGENT", "DEFAULT_TARGET", "FrozenModel", "Targets"), "astuner.model_tuner.targets"),
    },
)
