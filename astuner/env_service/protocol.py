"""The messages of the environment service: requests, responses and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from astuner.schema import Action, Evaluation, Observation, StepResult, TaskProfile

PROTOCOL_VERSION = 1
"""A client and a service of different versions do not understand each other."""

ActionPreference = Literal["code", "text", "box"]
ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "unknown_env_type",
    "unknown_task",
    "unknown_instance",
    "conflict",
    "task_ended",
    "too_many_instances",
    "environment_error",
    "invalid_result",
    "too_large",
    "timeout",
    "process_ended",
    "shutting_down",
]

STATUS: Mapping[ErrorCode, int] = {
    "invalid_request": 422,
    "unauthorized": 401,
    "unknown_env_type": 404,
    "unknown_task": 404,
    "unknown_instance": 404,
    "conflict": 409,
    "task_ended": 409,
    "too_many_instances": 429,
    "environment_error": 500,
    "invalid_result": 500,
    "too_large": 413,
    "timeout": 504,
    "process_ended": 502,
    "shutting_down": 503,
}
"""The HTTP status of each error."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EnvSource(_Message):
    """The environment of a request."""

    env_type: str
    """The name of the environment in the service."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The keyword arguments of the environment."""
    action_preference: ActionPreference = "text"
    """The form of actions that the client prefers."""


class CreateRequest(EnvSource):
    """The body of `POST /v1/instances`."""

    instance_id: str = Field(min_length=1, max_length=200)
    """The id of the new instance, chosen by the client. A repeated request returns the same instance."""
    client_id: str = Field(min_length=1, max_length=200)
    """The client, whose heartbeat keeps the instance."""
    split: str
    """The split of the task."""
    task_id: str
    """The task."""
    seed: int = Field(default=0, ge=0)
    """The seed for the randomness in the task's course."""


class StepRequest(_Message):
    """The body of `POST /v1/instances/{instance_id}/step`."""

    index: int = Field(ge=0)
    """The 0-based number of the step. A repeated request returns the stored result."""
    action: str | dict[str, Any]
    """A text, or a tool call `{"name": ..., "arguments": {...}}`."""


class EnvTypeInfo(_Message):
    """An environment type of the service."""

    env_type: str
    """The name of the environment in the service."""
    splits: list[str] = Field(default_factory=list)
    """The splits of its tasks."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """The tools of the environment, as OpenAI function schemas."""
    is_async: bool = False
    """Whether instances share a process."""


class EnvTypeList(_Message):
    """The body of `GET /v1/env_types`, which names the environments; `FAMILY/*` stands for a whole family."""

    env_types: list[str]
    """Their names."""


class TaskPage(_Message):
    """The body of `GET /v1/tasks`: tasks from a split, in a fixed order."""

    total: int
    """The number of tasks in the split."""
    task_ids: list[str]
    """The ids of the tasks from `offset` on."""
    profiles: list[TaskProfile] = Field(default_factory=list)
    """Their profiles, if they were requested."""


class CreatedInstance(_Message):
    """The response to `POST /v1/instances`."""

    instance_id: str
    """The id of the instance."""
    profile: TaskProfile
    """The task, without its reference."""
    observation: Observation
    """The first observation."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """The tools of the environment, as OpenAI function schemas."""


class InstanceInfo(_Message):
    """A running instance, in the response to `GET /v1/instances`."""

    instance_id: str
    """The id of the instance."""
    client_id: str
    """Its client."""
    env_type: str
    """Its environment."""
    split: str
    """The split of its task."""
    task_id: str
    """Its task."""
    steps: int
    """The number of steps so far."""
    idle_seconds: float
    """The time since the last request."""
    pid: int
    """The id of its process."""


class Health(_Message):
    """The response to `GET /health`."""

    status: Literal["ok"] = "ok"
    """`ok`."""
    protocol: int = PROTOCOL_VERSION
    """The version of this protocol."""
    instances: int
    """The number of instances."""
    max_instances: int
    """The maximum number of instances."""
    lease_seconds: float
    """The time after the last heartbeat of a client at which its instances are released."""
    step_timeout: float
    """The time limit of a reset, a step or an evaluation, in seconds."""


class ErrorInfo(_Message):
    """Why a request failed."""

    code: ErrorCode
    """The kind of the error."""
    message: str
    """The error in words."""
    traceback: str | None = None
    """The traceback, if the code of the environment raised."""


class ErrorResponse(_Message):
    """The body of every response whose status is at least 400."""

    error: ErrorInfo
    """The error."""


class ServiceRequestError(Exception):
    """A request to the service failed; carries the `ErrorInfo` of the response."""

    def __init__(self, code: ErrorCode, message: str, traceback: str | None = None) -> None:
        super().__init__(message)
        self.info = ErrorInfo(code=code, message=message, traceback=traceback)


ACTION: TypeAdapter[Action] = TypeAdapter(str | dict[str, Any])
STEP_RESULT = TypeAdapter(StepResult)
EVALUATION = TypeAdapter(Evaluation)
PROFILE = TypeAdapter(TaskProfile)
