"""Runs a program as the agent of an episode.

The program calls the model at `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`. It need not be
written in Python, and does not import astuner.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from astuner.config.root import AstunerConfig
from astuner.errors import AgentMadness, WorkflowError, short_repr
from astuner.model_tuner.targets import AUTO_AGENT
from astuner.model_tuner.tuner import ModelTuner
from astuner.processes.episode_processes import current_episode_processes
from astuner.schema import WorkflowOutput, WorkflowTask
from astuner.system.paths import remove_folder
from astuner.system.redaction.redactor import Redactor, current_redactor
from astuner.workflow import Workflow
from astuner.workflows.command.program import AgentProgram, EpisodeValues, copy_files

_CHUNK_BYTES = 2**16
_PIPE_BYTES = 2**20  # the largest pipe that a user may have
_MARGIN = 2**13  # more than the length of a secret
_TAIL_CHARACTERS = 1500
_POLL_SECONDS = 0.1
_LIMIT_GRACE_SECONDS = 10.0


@dataclass(eq=False)
class ProgramOutput:
    """One output stream of a program; the beginning and the end are kept.

    Attributes:
        limit: the maximum size of the part that `text` returns, in bytes.
        size: the size of the part that was read, in bytes.
    """

    limit: int
    size: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """Yield the end of a pipe to write to, and read the other end until the block ends."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(read, self._read, read)
        try:
            yield write
        finally:
            loop.remove_reader(read)
            # A daemon of the program may hold the pipe open and write on, so the file's end is not awaited.
            for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
                if not self._read(read):
                    break
            os.close(write)
            os.close(read)

    def _read(self, pipe: int) -> bool:
        """Read a chunk from the pipe; return whether it had any data."""
        try:
            data = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        kept = self.limit // 2 + _MARGIN
        room = kept - len(self._head)
        self.size += len(data)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * kept + _CHUNK_BYTES:
            del self._tail[:-kept]
        return bool(data)

    def text(self, api_key: str) -> str:
        """Return the stream without secrets and, if it is longer than the limit, without its middle."""
        redact = Redactor([*current_redactor().secrets, api_key])
        data = self._head + self._tail
        if self.size <= self.limit:
            return redact(_decoded(data))
        # Redacted before they are cut: a part of a secret is not recognised.
        half = self.limit // 2
        head, tail = data[: half + _MARGIN], data[-half - _MARGIN :]
        beginning = redact(_decoded(head))[: -len(_decoded(head[half:]))]
        end = redact(_decoded(tail), len(_decoded(tail[:_MARGIN])))
        return f"{beginning}\n[{self.size - 2 * half} bytes were cut]\n{end}"

    def last_line(self) -> str:
        """Return the last line that is not empty; "" if there is none."""
        return (_decoded(self._head + self._tail).strip().splitlines() or [""])[-1].strip()


def _decoded(data: bytes | bytearray) -> str:
    return data.decode("utf-8", errors="replace")


@dataclass(eq=False)
class CommandWorkflow(Workflow):
    """Runs the program in a private working folder, with the model's address and the task in its environment."""

    program: AgentProgram
    episode_metadata: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.name = Path(self.program.command[0]).name

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run the program; its exit code, its output and its working folder are metadata of the episode.

        Raises:
            WorkflowError: the program cannot be started, fails, calls no model, or prints no reward.
            AgentMadness: the program failed after degenerate output of the model.
        """
        config = self.program.config
        endpoint = model_tuner.as_oai_baseurl_apikey(AUTO_AGENT)
        values = EpisodeValues(workflow_task.task, config, endpoint, model_tuner.model_name)
        with _private_folder() as folder:
            work = folder / "work"
            self.episode_metadata["working_folder"] = str(work)
            copy_files([values.fill(file) for file in config.files], work, self.program.search)
            argv = [values.fill(word) for word in self.program.command]
            output = [ProgramOutput(config.max_output_bytes), ProgramOutput(config.max_output_bytes)]
            try:
                code = await _run(argv, work, values.environment(folder, workflow_task), output, model_tuner)
            except (OSError, ValueError) as error:
                hint = "; add a first line that names its interpreter, such as #!/bin/sh"
                raise WorkflowError(
                    f"the command {short_repr(argv[0])} cannot be started: {error}"
                    f"{hint if isinstance(error, OSError) and error.errno == errno.ENOEXEC else ''}"
                ) from error
            finally:
                stdout, stderr = (stream.text(endpoint.api_key) for stream in output)
                self.episode_metadata |= {"stdout": stdout, "stderr": stderr}
        self.episode_metadata["exit_code"] = code
        if code != 0:
            if model_tuner.anomaly is not None:
                raise AgentMadness(str(model_tuner.anomaly))
            ending = f"exited with code {code}" if code >= 0 else f"was ended by signal {-code}"
            if -code in set(signal.Signals):
                ending = f"was ended by {signal.Signals(-code).name}"
            raise WorkflowError(f"the command {short_repr(argv[0])} {ending}; {_tail(stdout, stderr)}")
        if not model_tuner.calls:
            raise WorkflowError(
                f"the command {short_repr(argv[0])} made no LLM call; expected calls to the address in OPENAI_BASE_URL "
                f"or ANTHROPIC_BASE_URL, with the key in OPENAI_API_KEY or ANTHROPIC_API_KEY; {_tail(stdout, stderr)}"
            )
        if self.program.has_judge:
            return WorkflowOutput(metadata={"final_answer": stdout.strip()})
        line = output[0].last_line()
        if (result := _result(line)) is None:
            raise WorkflowError(
                f"the last line of the command's stdout is {short_repr(line)}; expected the reward, a finite number or "
                'JSON such as {"reward": 0.5, "is_success": false}, because no judge is configured: print the reward '
                "last, or set task_judge.judge_protocol"
            )
        return result


def _result(line: str) -> WorkflowOutput | None:
    """Return the result in a program's last line: a number, or JSON with `reward` and `is_success`; None if neither."""
    with contextlib.suppress(ValueError):
        reward = float(line)
        return WorkflowOutput(reward=reward) if math.isfinite(reward) else None
    with contextlib.suppress(ValueError, OverflowError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict) and {"reward"} <= value.keys() <= {"reward", "is_success"}:
            reward, success = value["reward"], value.get("is_success")
            is_valid = type(reward) in (int, float) and (success is None or isinstance(success, bool))
            if is_valid and math.isfinite(reward):
                return WorkflowOutput(reward=float(reward), is_success=success)
    return None


async def _run(
    argv: Sequence[str], folder: Path, env: Mapping[str, str], output: Sequence[ProgramOutput], tuner: ModelTuner
) -> int:
    """Run the program in its working folder and return its exit code, -n if signal n ended it."""
    with output[0].reading() as stdout, output[1].reading() as stderr:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=env,
            start_new_session=True,
        )
        exited = asyncio.ensure_future(process.wait())
        try:
            ends_at = math.inf
            while not exited.done() and time.monotonic() < ends_at:
                await asyncio.wait([exited], timeout=_POLL_SECONDS)
                # A program that repeats a rejected call would do so until the time limit.
                if tuner.call_limit_error is not None and ends_at == math.inf:
                    ends_at = time.monotonic() + _LIMIT_GRACE_SECONDS
            return exited.result() if exited.done() else -signal.SIGTERM
        finally:
            exited.cancel()
            # Processes that ignore the signal or have left the group end with the episode.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Create a folder with a working, a home and a temporary folder; it is removed at the end of the episode."""
    folder = Path(tempfile.mkdtemp(prefix="astuner-episode-"))
    for name in ("work", "home", "tmp"):
        (folder / name).mkdir()
    processes = current_episode_processes()
    if processes is not None:
        processes.folders.append(folder)
    try:
        yield folder
    finally:
        if processes is None:
            remove_folder(folder)


def _tail(stdout: str, stderr: str) -> str:
    """Return the end of stderr for a message, or stdout's if stderr is empty."""
    name, text = ("stderr", stderr.strip()) if stderr.strip() else ("stdout", stdout.strip())
    return f"the end of its {name}:\n{text[-_TAIL_CHARACTERS:]}" if text else "it printed nothing"


def command_workflow(config: AstunerConfig, search: Sequence[Path]) -> Callable[[], Workflow]:
    """Return what creates an episode's workflow for `workflow.command`; the program's files are in `search`.

    Raises:
        ConfigError: the command cannot be executed, or a file or an environment variable does not exist.
    """
    return partial(CommandWorkflow, AgentProgram.of(config.workflow, search, has_judge=config.task_judge.has_judge))
