"""`astuner` in processes that fork from a server with the imports, which cost five seconds of processor time otherwise.

Tests of the interpreter's start and end, of debuggers and of the installed command start a real `python -m astuner`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_NAME = "preloaded_astuner"
"""The name of this module in the process that becomes `astuner`."""
_PRELOADED = [
    *("astuner.cli", "astuner.backbone.local.backbone", "astuner.run_record.plots"),
    *("agentscope", "torch", "transformers"),
]


class AstunerProcess:
    """A process of the command `astuner`, with the methods of `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        output: IO[Any],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        """Start it.

        Args:
            arguments: those of the command.
            cwd: working folder.
            output: the file of its stdout and stderr, which it appends to.
            env: its environment; this process's if None.
            start_new_session: whether it leads a new session.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        environment = dict(os.environ if env is None else env)
        request = (arguments, str(cwd), environment, os.path.abspath(output.name), start_new_session)
        # The process runs this file, because `tests` may be a package of a library there.
        self._process = context.Process(target=runpy.run_path, args=(__file__, {"REQUEST": request}, _NAME))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.arguments = arguments

    @property
    def returncode(self) -> int | None:
        """The exit code; the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(["astuner", *self.arguments], timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: tuple[str, ...], cwd: str, env: dict[str, str], output: int, start_new_session: bool) -> None:
    """Become `python -m astuner ARGUMENTS`."""
    if start_new_session:
        os.setsid()
    os.chdir(cwd)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    paths = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in (*paths, *inherited, ""))]
    number = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = ["astuner", *arguments]
    from astuner.__main__ import main

    try:
        main()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # a process of `multiprocessing` ends without them


if __name__ == _NAME:
    _run(*REQUEST)  # type: ignore[name-defined]  # noqa: F821
