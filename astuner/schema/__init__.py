"""The data types that modules exchange. They do not contain tensors; all but `WorkflowOutput` are frozen."""

from astuner.schema.environment import (
    Action,
    EnvInstance,
    EnvTask,
    Evaluation,
    Observation,
    Reference,
    StepResult,
    TaskProfile,
)
from astuner.schema.forks import Fork, ForkCause
from astuner.schema.judgement import Judgement
from astuner.schema.packed import Floats, Ints, Packed, Part, joined, pack_floats, pack_ints, part_of
from astuner.schema.records import (
    JSON_KEY,
    Anomaly,
    CallSpan,
    Episode,
    EpisodeStatus,
    LlmCall,
    Sample,
    Split,
    Task,
    TaskSet,
    TokenCounts,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.schema.rewards import AgentStep, checked_reward
from astuner.schema.sampling import Completion, FinishReason, Message, OutputConstraint, SamplingParams

__all__ = [
    "JSON_KEY",
    "Action",
    "AgentStep",
    "Anomaly",
    "CallSpan",
    "Completion",
    "EnvInstance",
    "EnvTask",
    "Episode",
    "EpisodeStatus",
    "Evaluation",
    "FinishReason",
    "Floats",
    "Fork",
    "ForkCause",
    "Ints",
    "Judgement",
    "LlmCall",
    "Message",
    "Observation",
    "OutputConstraint",
    "Packed",
    "Part",
    "Reference",
    "Sample",
    "SamplingParams",
    "Split",
    "StepResult",
    "Task",
    "TaskProfile",
    "TaskSet",
    "TokenCounts",
    "WorkflowOutput",
    "WorkflowTask",
    "checked_reward",
    "joined",
    "pack_floats",
    "pack_ints",
    "part_of",
]
