"""Shell commands in a sandbox, on files that persist from command to command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from astuner.sandbox.program import SandboxLimits, SandboxResult, SandboxRoot, run_program
from astuner.system.paths import remove_folder

_NOBODY = 65534
_PREFIX, _LOCK = "astuner-shell-", "lock"
_HOME = "/root"
_TMP = "/tmp"


class ShellSandbox:
    """A file system with writable folders, in which shell commands run one after the other.

    Commands see the host's programs and libraries, which they cannot change, and the folders of the sandbox. They
    have no network. The processes of a command end with the command; files remain until `close`. The sandbox needs
    user namespaces.

    Args:
        folders: absolute paths of the writable folders, each directly below `/`. `/tmp` and the home `/root` are added.
        cwd: the working directory.
        limits: the limits of each command; `disk` limits all folders together (see `size`).
        env: environment variables of the commands.
    """

    def __init__(
        self,
        folders: Sequence[str],
        cwd: str,
        *,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008 it is immutable
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._cwd = cwd
        self.limits = limits
        # In the sandbox, the user is root, but other users do not exist, so tar cannot restore them.
        self._env = {"HOME": _HOME, "TMPDIR": _TMP, "PWD": cwd, "TAR_OPTIONS": "--no-same-owner", **(env or {})}
        # The files of sandboxes whose process was killed.
        for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
            with contextlib.suppress(OSError), lock.open("w") as file:  # it belongs to another user, or is in use
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(lock.parent)
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = (self._folder / "new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self._folder / "new").rename(self._folder / _LOCK)
        self._mounts: dict[str, str] = {}
        for folder in {_HOME, _TMP, *folders, cwd}:
            self.make_folder(folder)

    def host_path(self, path: str) -> Path:
        """Return the host path for a path in one of the sandbox's folders.

        Programs may have put symbolic links there, which point to other files on the host.
        """
        top, _, rest = path.lstrip("/").partition("/")
        return Path(self._mounts[f"/{top}"]) / rest

    def copy(self, source: Path, target: str) -> None:
        """Copy a file or the content of a folder into the sandbox. Only for targets that no program has written to.

        Args:
            source: the file or folder on the host.
            target: its absolute path in the sandbox. A new folder below `/` is added to the sandbox.
        """
        self._make("/" + target.lstrip("/").partition("/")[0])
        path = self.host_path(target)
        if source.is_dir():
            shutil.copytree(source, path, symlinks=True, dirs_exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path)
        self._give(Path(self._mounts["/" + target.lstrip("/").partition("/")[0]]))

    def make_folder(self, path: str) -> None:
        """Make an empty folder. Only for paths that no program has written to.

        Args:
            path: its absolute path in the sandbox. A new folder below `/` is added to the sandbox.
        """
        self._make("/" + path.lstrip("/").partition("/")[0])
        self.host_path(path).mkdir(parents=True, exist_ok=True)
        self._give(self.host_path(path))

    async def run(
        self, command: str, timeout: float, *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> SandboxResult:
        """Run a command with bash.

        Args:
            command: the command, which may have several lines.
            timeout: seconds of wall-clock time after which it is ended.
            env: further environment variables.
            cwd: the working directory, if it is not that of the sandbox.

        Raises:
            SandboxError: the system has no user namespaces.
        """
        root = SandboxRoot(self._mounts, cwd or self._cwd)
        environment = {**self._env, **(env or {})}
        return await run_program(["bash", "-c", command], timeout, self.limits, env=environment, root=root)

    def size(self) -> int:
        """Return the size of the files, in bytes."""
        size = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(OSError):
                    size += Path(folder, name).lstat().st_size
        return size

    def close(self) -> None:
        """Remove the files."""
        remove_folder(self._folder)
        self._lock.close()

    def _make(self, folder: str) -> None:
        if folder not in self._mounts:
            path = self._folder / folder.strip("/")
            path.mkdir()
            self._mounts[folder] = str(path)
            self._give(path)

    @staticmethod
    def _give(path: Path) -> None:
        """Give files to the user of the sandbox, which is another one if this process belongs to root."""
        if os.geteuid() != 0:
            return
        with contextlib.suppress(OSError):  # a user namespace may have no other user
            for folder, _, names in os.walk(path):
                for entry in (folder, *(os.path.join(folder, name) for name in names)):
                    os.chown(entry, _NOBODY, _NOBODY, follow_symlinks=False)
