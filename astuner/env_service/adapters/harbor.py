"""Task folders in the format of Harbor (https://www.harborframework.com/docs/tasks) that need no container image."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from astuner.env_service.adapters.harbor_tasks import HarborTask, UnsupportedTaskError, find_tasks, read_task
from astuner.env_service.adapters.seeded import action_tool, chosen_action
from astuner.env_service.environment import Environment, tool_schema
from astuner.errors import EnvError, short_repr, shorten
from astuner.sandbox import SandboxLimits, SandboxResult, ShellSandbox
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile

_REWARDS = "/logs/verifier"
_MAX_REWARD_BYTES = 2**20
_SUBMIT = "submit"
_FORMS = {
    "text": "Reply with the command only, without explanations.",
    "box": "Put the command in \\boxed{}.",
    "code": "Put the command in a fenced code block.",
}
_INSTRUCTION = """\
{instruction}

You work in a Linux shell, in the folder {cwd}. Each turn, reply with one bash command, which may have several lines. \
{form} Files persist from command to command; variables, the working directory and background processes do not. There \
is no network. Reply with {submit} when the task is done."""


class HarborEnvironment(Environment):
    """The tasks of a folder. An action is a bash command, which runs in the sandbox.

    The task ends with the action `submit`, after `max_steps` commands, when the commands have used up the task's
    `agent.timeout_sec`, or when the files exceed its storage. The evaluation then runs `tests/test.sh`, and the score
    is the reward that the script writes. The agent's processes have ended by then, and the folders of the tests and the
    reward are new, so the agent can neither read the tests nor write the reward.

    Args:
        folder: path of a task folder, or a folder with task folders.
        max_steps: the number of commands after which a task ends.
        command_timeout: seconds after which a command is ended.
        max_output: bytes that the agent sees from a command's stdout and stderr, each.
        validation_share: the share of the tasks, from 0 to 1, that belong to the split `validation`. A hash of
            their names selects them.
        base_images: patterns of base images from which the tasks need no files, in addition to the Ubuntu, Debian
            and Python images.
        skip_unsupported: whether to leave out tasks that the sandbox cannot run. Otherwise, they are an error.

    Raises:
        EnvError: there are no tasks, or one cannot be read or run.
    """

    def __init__(
        self,
        folder: str,
        max_steps: int = 50,
        command_timeout: float = 30.0,
        max_output: int = 10_000,
        validation_share: float = 0.0,
        base_images: Sequence[str] = (),
        skip_unsupported: bool = False,
    ) -> None:
        path = Path(folder).expanduser()
        if not 0 <= validation_share <= 1:
            raise EnvError(f"validation_share must be from 0 to 1, got {short_repr(validation_share)}")
        self._tasks: dict[str, dict[str, HarborTask]] = {"train": {}, "validation": {}}
        unsupported = {}
        for task_folder in find_tasks(path):
            name = task_folder.resolve().name
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
            try:
                task = read_task(task_folder, base_images)
            except UnsupportedTaskError as error:
                unsupported[name] = str(error)
            else:
                self._tasks["validation" if number < validation_share else "train"][name] = task
        if unsupported and (not skip_unsupported or not any(self._tasks.values())):
            listed = "".join(f"\n- {name}: {reason}" for name, reason in unsupported.items())
            raise EnvError(
                f"{len(unsupported)} tasks of {path} cannot run in the sandbox; skip_unsupported: True leaves them "
                f"out, if there are others:{listed}"
            )
        self._max_steps, self._command_timeout, self._max_output = max_steps, command_timeout, max_output
        self.tools = [action_tool("run", "Run a bash command.", "command")]
        self.tools += [tool_schema(_SUBMIT, "End the task.", {"type": "object", "properties": {}})]
        self._sandbox: ShellSandbox | None = None
        self._evaluation: Evaluation | None = None

    def splits(self) -> Sequence[str]:
        """Return the splits that have tasks."""
        return [split for split, tasks in self._tasks.items() if tasks]

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the names of the task folders."""
        return tuple(self._tasks[split])

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the instruction of a task."""
        task = self._tasks[split][task_id]
        form = _FORMS[self.action_preference]
        query = _INSTRUCTION.format(instruction=task.instruction, cwd=task.cwd, form=form, submit=_SUBMIT)
        solution = task.solution()
        reference = None if solution is None else Reference((solution, _SUBMIT))
        metadata = {"instruction": task.instruction, **task.metadata}
        return TaskProfile(task_id, query, metadata=metadata, reference=reference, max_steps=self._max_steps)

    async def reset(self, split: str, task_id: str, seed: int) -> Observation:  # type: ignore[override]
        """Make the files of the task."""
        self.close()
        self._task, self._evaluation = self._tasks[split][task_id], None
        self._steps, self._seconds_left, self._is_done = 0, self._task.agent_seconds, False
        limits = SandboxLimits()
        storage = self._task.storage or limits.disk
        memory = self._task.memory or limits.memory
        cpu = int(max(self._command_timeout, self._task.verifier_seconds)) + 1
        limits = replace(
            limits, memory=memory, disk=storage, file_size=storage, output=self._max_output, cpu_seconds=cpu
        )
        folders = ["/" + target.split("/")[1] for _, target in self._task.copies]
        self._sandbox = ShellSandbox(["/solution", *folders], self._task.cwd, limits=limits, env=self._task.env)
        for source, target in self._task.copies:
            self._sandbox.copy(source, target)
        result = await self._sandbox.run("ls -A", self._command_timeout)
        return Observation(f"Files in {self._task.cwd}:\n{result.stdout}" if result.stdout else "")

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        """Run a command, or end the task."""
        sandbox = self._require_sandbox()
        if self._is_done or self._evaluation is not None:
            raise EnvError("the task has ended; it accepts no further action")
        command = chosen_action(action, self.action_preference, (_SUBMIT,), tool="run", argument="command")
        self._steps += 1
        if command == _SUBMIT:
            self._is_done = True
            return StepResult(Observation(""), is_done=True)
        if not command or "\0" in command:
            self._is_done = self._steps >= self._max_steps
            text = f"Invalid action: expected a bash command, or {_SUBMIT}."
            return StepResult(Observation(text), is_done=self._is_done, is_valid=False)
        start = time.monotonic()
        result = await sandbox.run(command, min(self._command_timeout, self._seconds_left))
        self._seconds_left -= time.monotonic() - start
        text = _observation(result)
        if sandbox.size() > sandbox.limits.disk:
            text += f"\n[the files are larger than {sandbox.limits.disk} bytes, so the task ends]"
            self._is_done = True
        self._is_done = self._is_done or self._seconds_left <= 0 or self._steps >= self._max_steps
        info = {"returncode": result.returncode, "isolation": result.isolation}
        return StepResult(Observation(text), is_done=self._is_done, info=info)

    async def evaluate(self) -> Evaluation:  # type: ignore[override]
        """Run the tests, and return the reward. The task accepts no action afterwards.

        Raises:
            EnvError: the tests succeed, but give no valid reward.
        """
        sandbox = self._require_sandbox()
        if self._evaluation is not None:
            return self._evaluation
        sandbox.copy(self._task.folder / "tests", "/tests")
        sandbox.make_folder(_REWARDS)
        result = await sandbox.run(
            "chmod +x /tests/test.sh && /tests/test.sh", self._task.verifier_seconds, env=self._task.verifier_env
        )
        output = _observation(result)
        rewards = _read_rewards(sandbox.host_path(_REWARDS))
        if rewards is None and result.returncode == 0:
            raise EnvError(
                f"tests/test.sh of {self._task.folder} wrote neither {_REWARDS}/reward.txt nor {_REWARDS}/reward.json; "
                f"its output: {shorten(output)}"
            )
        rewards = rewards or {"reward": 0.0}
        score = 0.0 if result.ended_by is not None else rewards.get("reward", next(iter(rewards.values())))
        details = {"rewards": rewards, "returncode": result.returncode, "output": output}
        self._evaluation = Evaluation(score, score >= 1, details=details)
        return self._evaluation

    def close(self) -> None:
        """Remove the files."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _require_sandbox(self) -> ShellSandbox:
        if self._sandbox is None:
            raise EnvError("no task has been started, or the environment is closed; call reset first")
        return self._sandbox


create = HarborEnvironment


def _observation(result: SandboxResult) -> str:
    text = "\n".join(part.rstrip("\n") for part in (result.stdout, result.stderr) if part)
    return text if result.returncode == 0 else f"{text}\n[exit code {result.returncode}]".lstrip("\n")


def _read_rewards(folder: Path) -> dict[str, float] | None:
    """Return the rewards that the tests wrote; None if there are none. As Harbor, reward.json comes first."""
    for name in ("reward.json", "reward.txt"):
        try:
            # The tests run the agent's code, which may put a link to a file of the host here.
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            text = file.read(_MAX_REWARD_BYTES).decode(errors="replace")
        try:
            values = json.loads(text) if name == "reward.json" else {"reward": float(text)}
            rewards = {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}
        except (ValueError, AttributeError) as error:
            raise EnvError(f"{_REWARDS}/{name} is not valid: {shorten(repr(text))} ({error})") from error
        if "reward" in rewards or len(rewards) == 1:
            return rewards
        if name == "reward.txt":
            return None
    return None
