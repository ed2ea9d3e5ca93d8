"""Environments of verifiers (https://github.com/primeintellect-ai/verifiers), in processes with their own packages."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from astuner.env_service.environment import Environment
from astuner.errors import EnvError, short_repr, shorten
from astuner.schema import Action, Evaluation, Observation, StepResult, TaskProfile
from astuner.system.child_process import wait_or_kill
from astuner.system.paths import installed_program

PYTHON_VARIABLE = "ASTUNER_VERIFIERS_PYTHON"
_BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
_END_SECONDS = 10.0


class VerifiersEnvironment(Environment):
    """A taskset of verifiers with one agent. Each instance has its own process, in which verifiers runs the episode.

    An action is a model answer: a text, or a call to one of the task's tools. The observation is the text of the
    messages that follow: the tools' results, or the simulated user's messages. The score is the sum of the weighted
    rewards.

    Args:
        name: the id of the taskset, a package or module that exports a `Taskset`.
        config: the environment's config in verifiers (`EnvConfig`), for example `{"taskset": {"split": "train"}}`.
        validation: values of the config that differ for the split `validation`, which does not exist without them.
        max_tasks: the number of a split's tasks that are read.
        python: the interpreter with verifiers and the taskset; by default, `ASTUNER_VERIFIERS_PYTHON`, or
            that of `astuner install verifiers`.
        cwd: the working directory of the processes, in which modules are found.
        timeout: time limit for the start and for a step, in seconds.

    Raises:
        EnvError: there is no such interpreter.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        validation: Mapping[str, Any] | None = None,
        max_tasks: int = 1000,
        python: str | None = None,
        cwd: str = ".",
        timeout: float = 300.0,
    ) -> None:
        self._name, self._cwd, self._timeout, self._max_tasks = name, cwd, timeout, max_tasks
        base = _merged({"taskset": {"id": name}}, config or {})
        self._configs = {"train": base} | ({} if validation is None else {"validation": _merged(base, validation)})
        self._python = python or os.environ.get(PYTHON_VARIABLE) or installed_program("verifiers", "python") or ""
        if not self._python or shutil.which(self._python) is None:
            given = f"there is no interpreter {short_repr(self._python)}" if self._python else "no interpreter is set"
            raise EnvError(
                f"{given}. Install verifiers in a separate virtual environment with `astuner install verifiers`, or "
                f"set {PYTHON_VARIABLE} or the parameter python to an interpreter with verifiers"
            )
        self._tasks: dict[str, list[dict[str, Any]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = ""
        self._end: Mapping[str, Any] | None = None

    def splits(self) -> Sequence[str]:
        """Return `train`, and `validation` if this split has a config."""
        return tuple(self._configs)

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the indices of the tasks."""
        return [str(index) for index in range(len(self._tasks_of(split)))]

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the prompt of a task."""
        task = self._tasks_of(split)[int(task_id)]
        system = task["system_prompt"]
        messages = ({"role": "system", "content": system},) if system else ()
        metadata = {"verifiers_id": task["id"]} if task["id"] else {}
        return TaskProfile(task_id, task["prompt"] or "", cast(Any, messages), metadata)

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Start a task. verifiers does not have seeds of episodes."""
        task = self._tasks_of(split)[int(task_id)]
        self._end = None
        turn = self._ask("reset", index=int(task_id))
        if "messages" not in turn:
            raise EnvError(f"verifiers ended the task before its first turn: {shorten(str(turn['errors']))}")
        self.tools = turn["tools"]
        known = [task["system_prompt"], task["prompt"]]
        return Observation("\n\n".join(each["text"] for each in turn["messages"] if each["text"] not in known))

    def step(self, action: Action) -> StepResult:
        """Answer as the model."""
        if self._process is None:
            raise EnvError("no task has been started, or the environment is closed; call reset first")
        if self._end is not None:
            raise EnvError("the task has ended; it accepts no further action")
        if isinstance(action, str):
            turn = self._ask("step", content=action, tool_calls=[])
        else:
            turn = self._ask("step", content=None, tool_calls=[dict(action)])
        if "messages" in turn:
            self.tools = turn["tools"]
            return StepResult(Observation("\n\n".join(each["text"] for each in turn["messages"])))
        self._end = turn
        if turn["errors"]:
            raise EnvError(f"the episode failed in verifiers: {shorten('; '.join(turn['errors']))}")
        return StepResult(Observation(""), turn["reward"], is_done=True, info={"metrics": turn["metrics"]})

    def evaluate(self) -> Evaluation:
        """Return the sum of the weighted rewards; 0 before the end, because verifiers scores finished episodes."""
        if self._end is None:
            return Evaluation(0.0, False, details={"is_done": False})
        details = {"is_done": True, "rewards": self._end["rewards"], "metrics": self._end["metrics"]}
        return Evaluation(self._end["reward"], details=details)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.close()
            wait_or_kill(self._process, _END_SECONDS)
            self._process.stdout.close()
            self._log.close()
            self._process, self._loaded = None, ""

    def _tasks_of(self, split: str) -> list[dict[str, Any]]:
        """Return the tasks of a split, whose config the process then has."""
        if self._loaded != split:
            self.close()
            self._start()
            self._tasks[split] = self._ask("load", config=self._configs[split], limit=self._max_tasks)["tasks"]
            self._loaded = split
        return self._tasks[split]

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        self._process = subprocess.Popen(
            # Without the folder of the bridge in sys.path, whose mcp.py would hide the package mcp
            [self._python, "-P", str(_BRIDGE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._cwd,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": str(Path(self._cwd).absolute())},  # also for the processes of tools
        )

    def _ask(self, operation: str, **fields: Any) -> Any:
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"op": operation, **fields}).encode() + b"\n")
            line, ends_at = b"", time.monotonic() + self._timeout
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not line.endswith(b"\n"):
                    if not selector.select(max(0.0, ends_at - time.monotonic())):
                        raise EnvError(f"verifiers did not answer within {self._timeout:g} s")
                    chunk = self._process.stdout.read(2**16)
                    if not chunk:
                        break
                    line += chunk
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._log.seek(0)
            text = self._log.read().decode(errors="replace").strip()
            self.close()
            raise EnvError(f"the process of verifiers ended in {operation}: {shorten(text[-1000:])}")
        answer = json.loads(line)
        if "error" in answer:
            raise EnvError(f"verifiers could not {operation} {self._name}: {shorten(answer['error'])}")
        return answer


create = VerifiersEnvironment


def _merged(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in update.items():
        known = result.get(key)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        result[key] = _merged(cast(Any, known), value) if both else value
    return result
