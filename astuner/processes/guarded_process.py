"""A process in a group of its own that does not outlive this one, however this one ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import astuner
from astuner.errors import ServiceError
from astuner.processes.group import end_group
from astuner.processes.guard import KEEP

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
_GUARDS_OWN_SECONDS = 15.0
_GUARD = (sys.executable, "-P", "-m", "astuner.processes.guard")


@dataclass(frozen=True, slots=True)
class OwnFolder:
    """A folder for a process's temporary files, which is removed at its end, however that comes.

    Attributes:
        parent: where it is made; "" for where Python makes such folders.
        variables: of the process's environment, that name it.
    """

    parent: str = ""
    variables: tuple[str, ...] = ("TMPDIR",)


class GuardedProcess:
    """A process under a guard (`guard`) that ends its group when told to, or when this process dies."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        *,
        output: IO[bytes] | None = None,
        own_tmp: OwnFolder | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """Start it.

        Args:
            argv: the command line.
            cwd: its working directory.
            env: its environment.
            output: a file for what it writes to stdout and stderr; None for the pipe `self.output`.
            own_tmp: give it a folder for temporary files of its own.
            grace: seconds between SIGTERM and SIGKILL.

        Raises:
            ServiceError: it cannot be started.
        """
        self._grace = grace
        # The guard is found where this package was, whatever led Python there.
        package = str(Path(astuner.__file__).parents[1])
        here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
        self._guard = subprocess.Popen(
            _GUARD,
            env=here,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is for the launcher, which ends services last
        )
        assert self._guard.stdin
        assert self._guard.stderr
        own = None if own_tmp is None else {"parent": own_tmp.parent or None, "variables": own_tmp.variables}
        order = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "grace": grace, "own_tmp": own}
        with contextlib.suppress(BrokenPipeError):  # a guard that has died says why
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
        self.output = self._guard.stdout
        """What the process writes to stdout and stderr; None where it goes to a file."""
        self.pid = self._read_pid(self._guard.stderr)
        """The process, and its group."""

    def _read_pid(self, told: IO[bytes]) -> int:
        line = told.readline()
        answer = json.loads(line) if line.startswith(b"{") else {"error": (line + told.read()).decode(errors="replace")}
        if "pid" in answer:
            return int(answer["pid"])
        self.ask_to_end()
        self._guard.wait()
        if self.output is not None:
            self.output.close()
        told.close()
        raise ServiceError(answer["error"].strip() or "its guard ended")

    @property
    def guard_pid(self) -> int:
        """The guard: SIGTERM to it ends the group in order."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, 128 + n where signal n ended it; None while it lives."""
        return self._guard.poll()

    def ask_to_end(self) -> None:
        """Have the guard end the group; do not wait."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()

    def end(self) -> None:
        """End the group and wait until it is gone; may be called again."""
        assert self._guard.stderr
        if self._guard.stderr.closed:
            return
        self.ask_to_end()
        try:
            code = self._guard.wait(self._grace + _GUARDS_OWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
        # A guard that was itself killed has ended nothing.
        if code < 0:
            end_group(self.pid, self._grace)
        self._guard.stderr.close()

    def keep(self) -> None:
        """Let it outlive this process: from now on only SIGTERM to the guard, or its own end, ends it."""
        assert self._guard.stdin
        assert self._guard.stderr
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(KEEP)
            self._guard.stdin.flush()
        self._guard.stdin.close()
        self._guard.stderr.close()
        atexit.register(self._guard.poll)  # Python warns of a process that nobody asks about when its handle goes
