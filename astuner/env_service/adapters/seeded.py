"""Tasks that are generated from seeds, with splits that have no task in common."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from astuner.env_service.environment import Environment, tool_schema
from astuner.errors import EnvError, shorten
from astuner.schema import Action, Evaluation, Observation, StepResult

# The parts of a task's seed, which has 32 bits because NumPy's global generator takes no more:
# 10 bits for `seed`, 1 for the split, 5 for the attempt and 16 for the task.
MAX_SEED = 1023
MAX_TASKS = 65_536
_ATTEMPTS = 32
_BOX = "\\boxed{"
_CODE_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class SeededTask:
    """A task that was generated from a seed.

    Attributes:
        seed: the seed, less than 2^32.
        content: the part of the task that no task in another split may have.
        data: further results of the generation.
    """

    seed: int
    content: str
    data: Any = None


class SeededEnvironment(Environment):
    """Base class of environments whose tasks are generated from seeds.

    The splits' seeds are disjoint. In addition, a hash of its content assigns each task to a split: if a seed gives a
    task for the other split, the next seed is used. Thus, no two splits have a task with the same content, whatever
    `seed` and the numbers of tasks are.

    Args:
        train_tasks, validation_tasks: numbers of tasks, at most 65,536.
        seed: selects the tasks, 0 to 1023.

    Raises:
        EnvError: an argument is out of its bounds.

    Attributes:
        has_distinct_tasks: whether too few distinct tasks for two splits are an error. Otherwise, such an environment
            has the same tasks in both splits.
        max_steps: the number of steps after which the task ends; None if there is no limit.
    """

    has_distinct_tasks: ClassVar[bool] = True
    max_steps: int | None = None

    def __init__(self, train_tasks: int = 1000, validation_tasks: int = 100, seed: int = 0) -> None:
        self._counts = {"train": train_tasks, "validation": validation_tasks}
        for name, value, lowest, highest in (
            ("train_tasks", train_tasks, 1, MAX_TASKS),
            ("validation_tasks", validation_tasks, 1, MAX_TASKS),
            ("seed", seed, 0, MAX_SEED),
        ):
            if type(value) is not int or not lowest <= value <= highest:
                raise EnvError(f"{name} is {value!r}; expected an integer from {lowest} to {highest}")
        self._seed = seed
        self._found: dict[tuple[str, str], SeededTask] = {}
        self._state = "not started"
        self._steps = 0

    @abstractmethod
    def generate(self, seed: int) -> SeededTask:
        """Return the task that a seed gives. Equal seeds give equal tasks."""

    @abstractmethod
    def start(self, task: SeededTask, seed: int) -> Observation:
        """Start a task; `seed` determines the randomness in its course."""

    @abstractmethod
    def act(self, action: Action) -> StepResult:
        """Perform an action."""

    @abstractmethod
    def score(self) -> Evaluation:
        """Return the score so far."""

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the ids of the tasks: their numbers, from 0."""
        return [str(number) for number in range(self._count(split))]

    def task(self, split: str, task_id: str) -> SeededTask:
        """Return a task. The last one is kept.

        Raises:
            EnvError: there is no such task, or the environment has too few distinct tasks.
        """
        if (split, task_id) not in self._found:
            self._found = {(split, task_id): self._search(split, task_id)}
        return self._found[split, task_id]

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Start a task; EnvError if it does not exist, or the environment is closed."""
        if self._state == "closed":
            raise EnvError("the environment is closed")
        task = self.task(split, task_id)
        observation = self.start(task, seed)
        self._state, self._steps = "running", 0
        return observation

    def step(self, action: Action) -> StepResult:
        """Perform an action. The task ends after `max_steps` of them, valid or not.

        Raises:
            EnvError: the task has not been started or has ended, or the environment is closed.
        """
        self._require_started()
        if self._state == "ended":
            raise EnvError("the task has ended and accepts no further action; start a new instance")
        result = self.act(action)
        self._steps += 1
        if not result.is_done and self.max_steps is not None and self._steps >= self.max_steps:
            result = replace(result, is_done=True, info={**result.info, "truncated": True})
        if result.is_done:
            self._state = "ended"
        return result

    def evaluate(self) -> Evaluation:
        """Return the score so far.

        Raises:
            EnvError: the task has not been started, or the environment is closed.
        """
        self._require_started()
        return self.score()

    def close(self) -> None:
        """Close the environment; `reset`, `step` and `evaluate` then raise EnvError."""
        self._state = "closed"

    def _require_started(self) -> None:
        if self._state == "closed":
            raise EnvError("the environment is closed")
        if self._state == "not started":
            raise EnvError("no task has been started; call reset first")

    def _count(self, split: str) -> int:
        if split not in self._counts:
            raise EnvError(f"there is no split {shorten(repr(split))}; the splits are {', '.join(self._counts)}")
        return self._counts[split]

    def _search(self, split: str, task_id: str) -> SeededTask:
        """Return the first task among the seeds of `task_id` whose content belongs to the split."""
        count = self._count(split)
        if not (task_id.isdecimal() and task_id.isascii() and str(int(task_id)) == task_id and int(task_id) < count):
            raise EnvError(
                f"split {split} has no task {shorten(repr(task_id))}; its tasks are 0 to {count - 1}, see {split}_tasks"
            )
        side = list(self._counts).index(split)
        first = (self._seed << 22) + (side << 21) + int(task_id)
        tasks = (self.generate(first + (attempt << 16)) for attempt in range(_ATTEMPTS))
        first_task = None
        for task in tasks:
            if hashlib.sha256(task.content.encode("utf-8", "surrogatepass")).digest()[0] % 2 == side:
                return task
            first_task = first_task or task
        if self.has_distinct_tasks or first_task is None:
            raise EnvError(
                f"split {split} has no task {task_id}: the environment makes too few distinct tasks for two splits "
                f"({_ATTEMPTS} seeds gave tasks of the other one only); change its parameters so that it makes more"
            )
        return first_task


def chosen_action(action: Action, form: str, names: Sequence[str], *, tool: str, argument: str) -> str:
    """Return an action's text; the action may be a call to the environment's tool.

    Args:
        action: a text, or a tool call.
        form: the form of actions that the agent prefers: `box` for the content of the last `\\boxed{...}`, `code` for
            the last fenced code block's. A text without either is the action itself.
        names: the actions that may also be called as a tool with that name.
        tool, argument: the tool's name, and the name of the argument that has the action.

    Returns:
        The text without white space around it; "" if the call has another name or form.
    """
    if isinstance(action, str):
        blocks = _CODE_BLOCK.findall(action) if form == "code" else []
        box = _last_box(action) if form == "box" else None
        return (blocks[-1] if blocks else action if box is None else box).strip()
    name, arguments = action.get("name"), action.get("arguments")
    if name == tool and isinstance(arguments, Mapping):
        return str(arguments.get(argument, "")).strip()
    return name if isinstance(name, str) and name in names else ""


def _last_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, or None if there is none that is closed."""
    start = text.rfind(_BOX)
    depth = 1
    for position in range(start + len(_BOX), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start + len(_BOX) : position]
    return None


def action_tool(tool: str, description: str, argument: str, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the OpenAI function schema of a tool with one string argument; `names` are its values, if they are few."""
    schema: dict[str, Any] = {"type": "string", **({"enum": list(names)} if names else {})}
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    return tool_schema(tool, description, parameters)
