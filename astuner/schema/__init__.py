"""The data types that modules exchange. They do not contain tensors; all but `WorkflowOutput` are frozen."""

from astuner.schema.records import (
    JSON_KEY,
    CallSpan,
    Episode,
    EpisodeStatus,
    Fork,
    ForkCause,
    LlmCall,
    Message,
    Sample,
    Split,
    Task,
    TaskSet,
    TokenCounts,
    WorkflowOutput,
    WorkflowTask,
    checked_reward,
)
from astuner.schema.sampling import Completion, FinishReason, OutputConstraint, SamplingParams

__all__ = [
    "JSON_KEY",
    "CallSpan",
    "Completion",
    "Episode",
    "EpisodeStatus",
    "FinishReason",
    "Fork",
    "ForkCause",
    "LlmCall",
    "Message",
    "OutputConstraint",
    "Sample",
    "SamplingParams",
    "Split",
    "Task",
    "TaskSet",
    "TokenCounts",
    "WorkflowOutput",
    "WorkflowTask",
    "checked_reward",
]
