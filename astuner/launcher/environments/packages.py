"""pip or uv, whichever is there: making an environment, and putting packages into it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.errors import InstallError
from astuner.launcher.environments.inspection import environment_of_its_own

_TAIL = 25


@dataclass(frozen=True)
class Packages:
    """The packages of one environment.

    Attributes:
        folder: the environment's.
        log: gets what the tools say.
        lock: a file descriptor that they inherit, so that it stays locked while one of them lives.
        index: a further package index, "" for none but those of the tools' own configuration.
        uv: uv's path, None for pip.
    """

    folder: Path
    log: Path
    lock: int
    index: str = ""
    uv: str | None = None

    @property
    def tool(self) -> str:
        """The tool's name."""
        return "uv" if self.uv else "pip"

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    def make(self, interpreter: str) -> None:
        """Make the environment, empty but for pip.

        Raises:
            InstallError: it cannot be made.
        """
        if self.uv:
            # Unlike `-m venv`, this works on systems that ship Python without ensurepip.
            self._run([self.uv, "venv", "--no-project", "--allow-existing", "--python", interpreter, str(self.folder)])
        else:
            self._run([interpreter, "-m", "venv", str(self.folder)])

    def install(self, arguments: Sequence[str], *, dry_run: bool = False) -> None:
        """Install packages.

        Raises:
            InstallError: they cannot be found, or contradict each other (with the tool's words).
        """
        command = self._pip("install")
        command += ["--extra-index-url", self.index] if self.index else []
        command += ["--dry-run"] if dry_run else []
        if self.uv is None:
            command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        elif self.index:
            # A lock names exact versions, so the best match is the one that it means, wherever it is.
            command += ["--index-strategy", "unsafe-best-match"]
        self._run([*command, *arguments])

    def remove(self, names: Sequence[str]) -> None:
        """Take packages out; those that are not there are passed over."""
        self._run([*self._pip("uninstall"), *(() if self.uv else ("--yes",)), *names])

    def _pip(self, verb: str) -> list[str]:
        if self.uv:
            return [self.uv, "pip", verb, "--python", str(self.python)]
        return [str(self.python), "-m", "pip", verb]

    def _run(self, command: Sequence[str]) -> None:
        with self.log.open("a") as log:
            # An index may be given with a password in its address.
            log.write(f"\n$ {' '.join('URL' if word == self.index else word for word in command)}\n")
            log.flush()
            began = log.tell()
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment_of_its_own(),
                    pass_fds=[self.lock],
                    check=False,
                )
            except OSError as error:
                raise InstallError(f"{command[0]} does not run: {error}") from error
        if done.returncode:
            with self.log.open() as log:
                log.seek(began)
                said = [line for line in log.read().splitlines() if line.strip()]
            raise InstallError(
                f"{self.tool} failed (exit code {done.returncode}); its words are in {self.log}, the last of them:\n  "
                + "\n  ".join(said[-_TAIL:])
            )


def find_uv() -> str | None:
    """Return uv's path, None if it is not installed."""
    return shutil.which("uv")


def find_interpreter(name: str | None, *, uv: bool) -> str:
    """Return the interpreter that an environment is to have.

    Args:
        name: a path, a command such as python3.12, or for uv a version; None for the running one.
        uv: whether uv is there to understand more than a path or a command.

    Raises:
        InstallError: there is no such interpreter.
    """
    if name is None:
        return sys.executable
    found = shutil.which(str(Path(name).expanduser()))
    if found is None and not uv:
        raise InstallError(
            f"--python {name}: there is no such interpreter; give a path, or a command such as python3.11"
        )
    return found or name
