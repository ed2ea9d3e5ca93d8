"""An instance of an environment in a service, as the client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from astuner.env_service.protocol import ACTION, EVALUATION, STEP_RESULT, CreatedInstance
from astuner.errors import EnvError, first_line, short_repr, shorten
from astuner.schema import Action, Evaluation, Observation, StepResult, TaskProfile

if TYPE_CHECKING:
    from astuner.env_service.client import EnvServiceClient

T = TypeVar("T")


class RemoteInstance:
    """An instance in an environment service. Implements `astuner.schema.EnvInstance`."""

    def __init__(self, client: EnvServiceClient, instance_id: str, env_type: str, created: CreatedInstance) -> None:
        self.instance_id = instance_id
        self.env_type = env_type
        self.profile: TaskProfile = created.profile
        self.observation: Observation = created.observation
        self.tools: Sequence[Mapping[str, Any]] = tuple(created.tools)
        self.steps: Sequence[StepResult] = ()
        self._client = client
        self._is_stepping = False
        self._is_released = False

    async def step(self, action: Action) -> StepResult:
        """Perform an action.

        Raises:
            EnvError: the environment or the service failed, the task or the instance has ended, or another step runs.
        """
        if self._is_stepping:
            raise EnvError("another step of this instance has not finished; await it first")
        if self.steps and self.steps[-1].is_done:
            raise EnvError("the task has ended, so the instance accepts no further action; see steps[-1].is_done")
        try:
            if not isinstance(action, str | Mapping):
                raise TypeError
            plain = ACTION.dump_python(ACTION.validate_python(action, strict=False), mode="json")
        except (ValidationError, ValueError, TypeError) as error:
            raise EnvError(
                f"the action is {short_repr(action)}; expected a text, or a tool call "
                '{"name": ..., "arguments": {...}} of JSON values'
            ) from error
        self._is_stepping = True
        try:
            body = await self._call("step", {"index": len(self.steps), "action": plain})
        finally:
            self._is_stepping = False
        result: StepResult = parsed(STEP_RESULT.validate_json, body)
        self.steps = (*self.steps, result)
        self.observation = result.observation
        return result

    async def evaluate(self) -> Evaluation:
        """Return the score so far.

        Raises:
            EnvError: the environment or the service failed, or the instance has ended.
        """
        return parsed(EVALUATION.validate_json, await self._call("evaluate", {}))

    def release(self) -> Future[None]:
        """Start to release the instance. May be called again, from any thread."""
        self._is_released = True
        return self._client.release(self.instance_id)

    async def _call(self, operation: str, body: Mapping[str, Any]) -> bytes:
        if self._is_released:
            raise EnvError(f"the instance of {self.env_type} was released, because its episode has ended")
        path = f"{instance_path(self.instance_id)}/{operation}"
        try:
            return await asyncio.wrap_future(self._client.submit(self._client.request("POST", path, body)))
        except EnvError as error:
            named = EnvError(f"environment {self.env_type}, task {shorten(self.profile.task_id)}: {error}")
            for note in getattr(error, "__notes__", ()):
                named.add_note(note)
            raise named from None


def instance_path(instance_id: str) -> str:
    """Return the path of an instance in the service."""
    return f"/v1/instances/{quote(instance_id, safe='')}"


def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """Return the value of a response.

    Raises:
        EnvError: it is not valid.
    """
    try:
        return parse(body)
    except ValidationError as error:
        raise EnvError(f"the environment service sent an answer that is not valid: {first_line(error)}") from error
