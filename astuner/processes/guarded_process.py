"""A child process that does not outlive this process, however this process ends; and its redacted log."""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TextIO

from astuner.errors import ServiceError
from astuner.processes.guard import DETACH
from astuner.run_record.files import write_errors
from astuner.system.child_process import start_module
from astuner.system.process_tree import end_processes, group_members
from astuner.system.redaction.output import RedactingStream
from astuner.system.redaction.redactor import StreamRedactor, current_redactor, redact

GRACE_SECONDS = 5.0
"""Default time between SIGTERM and SIGKILL."""
_GUARD_SECONDS = 15.0
_TAIL_LINES = 20
_BUFFERED_LINES = 10_000
_MAX_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TempDir:
    """A folder for a process's temporary files, which is removed when the process ends.

    Attributes:
        parent: the folder in which it is created; "" for Python's default.
        variables: environment variables that are set to its path.
    """

    parent: str = ""
    variables: tuple[str, ...] = ("TMPDIR",)


class GuardedProcess:
    """A process under a guard, which ends the process's group on request or if this process dies."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        *,
        output: IO[bytes] | None = None,
        temp_dir: TempDir | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """Start the process, with its output in a file or the pipe `self.output`; ServiceError: that is impossible.

        `grace` are the seconds between SIGTERM and SIGKILL.
        """
        self._grace = grace
        self._guard = start_module(
            "astuner.processes.guard",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal must reach the launcher only, which ends services last
        )
        assert self._guard.stdin
        assert self._guard.stderr
        folder = None if temp_dir is None else asdict(temp_dir)
        command = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "grace": grace, "temp_dir": folder}
        with contextlib.suppress(BrokenPipeError):  # if the guard has died, its stderr has the reason
            self._guard.stdin.write(json.dumps(command).encode() + b"\n")
            self._guard.stdin.flush()
        self.output = self._guard.stdout
        """Stdout and stderr of the process; None if they go to a file."""
        self.pid = self._read_pid(self._guard.stderr)
        """Id of the process and its group."""

    def _read_pid(self, stream: IO[bytes]) -> int:
        line = stream.readline()
        is_answer = line.startswith(b"{")
        answer = json.loads(line) if is_answer else {"error": (line + stream.read()).decode(errors="replace")}
        if "pid" in answer:
            return int(answer["pid"])
        self.request_end()
        self._guard.wait()
        if self.output is not None:
            self.output.close()
        stream.close()
        raise ServiceError(answer["error"].strip() or "its guard process ended")

    @property
    def guard_pid(self) -> int:
        """Id of the guard. SIGTERM to the guard ends the group."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, 128 + n if signal n ended the process; None while it runs."""
        return self._guard.poll()

    def request_end(self) -> None:
        """Have the guard end the group, without waiting."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()

    def end(self) -> None:
        """End the group and wait until it is gone. Further calls do nothing."""
        assert self._guard.stderr
        if self._guard.stderr.closed:
            return
        self.request_end()
        try:
            code = self._guard.wait(self._grace + _GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
        if code < 0:  # the guard was killed, and did not end the group
            end_processes(lambda: group_members(self.pid), self._grace)
        self._guard.stderr.close()

    def detach(self) -> None:
        """Let the child process continue after this process ends, until it exits or the guard receives SIGTERM."""
        assert self._guard.stdin
        assert self._guard.stderr
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(DETACH)
            self._guard.stdin.flush()
        self._guard.stdin.close()
        self._guard.stderr.close()
        atexit.register(self._guard.poll)  # prevents Python's ResourceWarning for a running child


class ProcessLog:
    """The log of one process across its restarts.

    Services start before the run record exists, because tasks may come from a service. Until `open`, the last 10,000
    lines are buffered.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._buffer: deque[str] = deque(maxlen=_BUFFERED_LINES)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._file: TextIO | None = None
        self._stream: RedactingStream | None = None

    def follow(self, output: IO[bytes]) -> threading.Thread:
        """Log every line of `output`, in a thread that ends with it."""
        thread = threading.Thread(target=self._copy, args=(output,), name=f"log of {self._name}", daemon=True)
        thread.start()
        return thread

    def _copy(self, output: IO[bytes]) -> None:
        redactor = StreamRedactor(current_redactor)  # a private key has several lines
        with output:
            while raw := output.readline(_MAX_LINE_BYTES):
                self._add(redactor.feed(raw.decode(errors="replace").rstrip("\r\n") + "\n"))
        self._add(redactor.finish())

    def _add(self, text: str) -> None:
        with self._lock:
            for line in text.split("\n")[:-1]:
                self._tail.append(line)
                if self._stream is None:
                    self._buffer.append(line)
                else:
                    self._stream.write(line + "\n")

    def open(self, folder: Path) -> Path:
        """Write the buffered and all further lines to `services/{name}.log` in the run's folder; return the file."""
        path = folder / "services" / f"{self._name}.log"
        with write_errors(path):
            path.parent.mkdir(exist_ok=True)
            file = path.open("a", encoding="utf-8")
        with self._lock:
            self._file, self._stream = file, RedactingStream(file)
            while self._buffer:
                self._stream.write(self._buffer.popleft() + "\n")
        return path

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = self._stream = None

    def has(self, text: str) -> bool:
        """Return whether one of the last lines contains a text."""
        with self._lock:
            return not text or any(text in line for line in self._tail)

    def tail(self) -> str:
        """Return the last lines, for an error message."""
        with self._lock:
            return last_lines(list(self._tail))


def last_lines(lines: Sequence[str]) -> str:
    """Return the last 20 lines without secrets, for an error message."""
    if not lines:
        return "it printed nothing"
    return redact("its last lines:\n" + "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]))
