"""The chat model that is trained: rendering, sampling, parsing and recording of its calls."""

from astuner.model_tuner.agent_model import AgentModel
from astuner.model_tuner.agent_names import AUTO_AGENT
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.call_settings import SAMPLING_PARAMETERS, CallSettings
from astuner.model_tuner.chat_options import ChatOptions
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall, load_tokenizer
from astuner.model_tuner.endpoint import OpenAiEndpoint
from astuner.model_tuner.history import HistoryEdit
from astuner.model_tuner.targets import DEFAULT_TARGET, FrozenModel, Targets
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
