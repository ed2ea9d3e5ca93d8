"""A child process that does not outlive this process, however this process ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import astuner
from astuner.errors import ServiceError
from astuner.processes.guard import DETACH, end_group

GRACE_SECONDS = 5.0
"""Default time between SIGTERM and SIGKILL."""
_GUARD_SECONDS = 15.0
_GUARD = (sys.executable, "-P", "-m", "astuner.processes.guard")


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
        """Start the process.

        Args:
            argv: command line.
            cwd: working directory.
            env: environment variables.
            output: file for stdout and stderr; None for the pipe `self.output`.
            temp_dir: folder to create for its temporary files.
            grace: seconds between SIGTERM and SIGKILL.

        Raises:
            ServiceError: the process cannot be started.
        """
        self._grace = grace
        # The guard must import the astuner of this process, even if it is not installed.
        package = str(Path(astuner.__file__).parents[1])
        python_path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._guard = subprocess.Popen(
            _GUARD,
            env={**os.environ, "PYTHONPATH": python_path},
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
        """Id of the process and of its group."""

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
            end_group(self.pid, self._grace)
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
