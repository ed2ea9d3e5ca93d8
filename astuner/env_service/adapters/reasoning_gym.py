"""Reasoning Gym: procedural generators of questions, each with a function that scores answers.

An environment has one step: the action is the answer.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from astuner.env_service.adapters.seeded import SeededEnvironment, SeededTask, action_tool, chosen_action
from astuner.errors import EnvError, describe_error, short_repr
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile

_FORMS = {
    "text": "You may write your reasoning first; then put the answer between <answer> and </answer>.",
    "box": "Put the answer in \\boxed{}.",
    "code": "Put the answer in a code block.",
}
# Generators compute a question from seed + index, and some from tables that they build for the whole data set.
_BLOCK = 256
_MAX_BLOCKS = 8
# Where generators that accept several answers keep one of them. The others are boxnet and rush_hour, which have none.
_EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")


def names() -> Sequence[str]:
    """Return the names of the generators, except `composite`, which needs the parameter `datasets`."""
    return sorted(DATASETS.keys() - {"composite"})


class ReasoningGymEnvironment(SeededEnvironment):
    """A Reasoning Gym generator's questions, scored by its own `score_answer`.

    Args:
        name: the generator, such as `chain_sum`.
        train_tasks, validation_tasks, seed: see `SeededEnvironment`.
        config: the fields of the generator's configuration.

    Raises:
        EnvError: there is no such generator, or a parameter is unknown.
    """

    def __init__(
        self, name: str, train_tasks: int = 1000, validation_tasks: int = 100, seed: int = 0, **config: Any
    ) -> None:
        if name not in DATASETS:
            raise EnvError(f"Reasoning Gym has no generator {short_repr(name)}; `astuner env list` shows the names")
        super().__init__(train_tasks, validation_tasks, seed)
        self.name = name
        self.tools = [action_tool("answer", "Answer the question.", "answer")]
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        if unknown := [key for key in config if key not in fields]:
            raise EnvError(
                f"reasoning_gym/{name} has no parameter {', '.join(map(short_repr, unknown))}; its parameters are "
                f"train_tasks, validation_tasks, seed, {', '.join(fields)}"
            )
        if name == "composite" and all(isinstance(entry, Mapping) for entry in config.get("datasets") or ()):
            config["datasets"] = [DatasetSpec(**entry) for entry in config.get("datasets") or ()]

        @functools.lru_cache(_MAX_BLOCKS)
        def block(number: int) -> Any:
            return reasoning_gym.create_dataset(name, seed=number * _BLOCK, size=_BLOCK, **config)

        self._block = block
        settings = DATASETS[name][1](**config)
        if hasattr(settings, "validate"):
            settings.validate()
        self._task = SeededTask(0, "")
        self._evaluation = Evaluation(0.0, is_success=False)

    def generate(self, seed: int) -> SeededTask:
        """Return the question of a seed."""
        number, index = divmod(seed, _BLOCK)
        with _isolated(seed):
            entry = self._block(number)[index]
        return SeededTask(seed, entry["question"], entry)

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the question, and its answer if the generator gives one."""
        task = self.task(split, task_id)
        form, metadata = _FORMS[self.action_preference], task.data["metadata"]
        answer = task.data["answer"]
        if (
            answer is None
            and (example := next((metadata[key] for key in _EXAMPLES if key in metadata), None)) is not None
        ):
            answer = example if isinstance(example, str) else json.dumps(example)
        return TaskProfile(
            task_id,
            f"{task.content}\n\nReply with the answer in the form that the question asks for. {form}",
            metadata={"generator": self.name, "seed": task.seed},
            reference=None if answer is None else Reference((str(answer),)),
            max_steps=1,
        )

    def start(self, task: SeededTask, seed: int) -> Observation:
        """Return an empty observation: the question is the instruction."""
        self.max_steps, self._task = 1, task
        self._evaluation = Evaluation(0.0, is_success=False)
        return Observation("")

    def act(self, action: Action) -> StepResult:
        """Score the answer: what is between <answer> and </answer> in the text, or the whole text."""
        text = chosen_action(action, self.action_preference, (), tool="answer", argument="answer")
        answer = extract_answer(text)
        answer = text if answer is None else answer
        details: dict[str, Any] = {"answer": answer}
        try:
            with _isolated(0), _without_effects():
                score = float(self._block(self._task.seed // _BLOCK).score_answer(answer, self._task.data))
        except (Exception, SystemExit) as error:
            # Some generators cannot parse every text. Such an answer is wrong; the cause is kept.
            score, details["scoring_error"] = 0.0, describe_error(error)
        if not math.isfinite(score):
            score, details["scoring_error"] = 0.0, f"the score was {score}"
        self._evaluation = Evaluation(score, is_success=score >= 1.0, details=details)
        return StepResult(Observation(""), score, is_done=True, is_valid=bool(answer), info=details)

    def score(self) -> Evaluation:
        """Return the score of the answer, from 0 to 1; 0 before it."""
        return self._evaluation


create = ReasoningGymEnvironment

_EFFECTS = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.link", "os.symlink"),
    *("subprocess.Popen", "pty.spawn", "socket.__new__", "ctypes.dlopen", "shutil.rmtree", "shutil.move"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_scoring_threads: set[int] = set()


def _refuse_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that refuses to start processes, use the network or write files while an answer is scored."""
    if _scoring_threads and threading.get_ident() in _scoring_threads:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
        if writes or event in _EFFECTS:
            raise PermissionError(f"an answer must not use {event}")


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_refuse_effects)


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    """Refuse effects on the machine meanwhile: some generators evaluate answers as Python or with SymPy's parser."""
    _add_hook()
    _scoring_threads.add(threading.get_ident())
    try:
        yield
    finally:
        _scoring_threads.discard(threading.get_ident())


@contextlib.contextmanager
def _isolated(seed: int) -> Iterator[None]:
    """Hide what generators print, and seed the global random generators, which some of them use, for a while."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
