"""Environment folders on disk: location, manifest and lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, Field

from astuner.errors import InstallError
from astuner.installer.env_specs import env_spec_named
from astuner.system.paths import FOLDER_VARIABLE, environments_folder

_MANIFEST = "astuner-environment.json"
_INCOMPLETE = "astuner-environment.unfinished"


class InstallManifest(BaseModel):
    """Contents of an environment. Written last, so its presence marks a complete installation.

    Attributes:
        spec, digest: the name of the environment's specification, and its pins' digest.
        source, editable, version: requirement that astuner was installed from, whether that is a checkout, and
            astuner's version.
        extra, extra_digest: absolute paths of the user's requirement files, and their contents' SHA-256.
        size: size on disk, bytes.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    spec: str = Field(validation_alias="recipe", serialization_alias="recipe")
    digest: str
    source: str
    editable: bool
    version: str
    python: str
    extra: tuple[str, ...]
    extra_digest: str
    seconds: float
    size: int


@dataclass(frozen=True)
class EnvDir:
    """The folder of an environment, which may not exist yet.

    Attributes:
        backbone: the name of the backbone or program that the environment is for.
        link: the folder, or a symbolic link to it.
    """

    backbone: str
    link: Path

    @staticmethod
    def of(backbone: str) -> EnvDir:
        """Return the folder for a backbone."""
        return EnvDir(backbone, environments_folder() / backbone)

    @property
    def folder(self) -> Path:
        """The folder with links resolved."""
        return self.link.resolve()

    @property
    def python(self) -> Path:
        """The environment's interpreter. It is a link that must not be resolved."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """Output of pip."""
        return self.link.with_name(f"{self.link.name}.log")

    def manifest(self) -> InstallManifest | None:
        """Return the manifest, or None if there is no complete environment."""
        try:
            return InstallManifest.model_validate_json((self.folder / _MANIFEST).read_bytes())
        except (OSError, ValueError):
            return None

    def is_incomplete(self) -> bool:
        """Whether an installation was started here and did not finish."""
        return (self.folder / _INCOMPLETE).exists()

    def mark_incomplete(self) -> None:
        """Mark the folder as not usable until `write_manifest`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _INCOMPLETE).touch()
        (self.folder / _MANIFEST).unlink(missing_ok=True)

    def write_manifest(self, manifest: InstallManifest) -> None:
        """Write the manifest and mark the environment as complete."""
        new = self.folder / f"{_MANIFEST}.new"
        new.write_text(manifest.model_dump_json(by_alias=True, indent=1) + "\n")
        new.replace(self.folder / _MANIFEST)
        (self.folder / _INCOMPLETE).unlink(missing_ok=True)

    def is_removable(self) -> bool:
        """Whether the folder may be deleted: it is missing, empty or was created by `astuner install`."""
        if not self.folder.exists() or (self.folder / _MANIFEST).exists() or self.is_incomplete():
            return True
        return self.folder.is_dir() and not any(self.folder.iterdir())

    def install_command(self, *, fresh: bool = False) -> str:
        """Return the command that installs, updates or (`fresh`) reinstalls the environment, with its options."""
        manifest = self.manifest()
        words = ["astuner install", self.backbone]
        spec = env_spec_named(manifest.spec) if manifest else None
        if spec is not None:
            words.append(f"--{spec.device}")
            words += ["--vllm"] if spec.vllm and spec.device == "cpu" and self.backbone == "verl" else []
        if fresh:
            words.append("--fresh")
            words += [f"--with {file}" for file in (manifest.extra if manifest else ())]
        return " ".join(words)

    @contextlib.contextmanager
    def locked_for_install(self) -> Iterator[int]:
        """Hold the exclusive lock; wait while another process installs.

        Yields:
            The lock's file descriptor. A child that inherits it holds the lock even if this process is killed.

        Raises:
            InstallError: a run is using the environment, or the lock file cannot be written.
        """
        lock = self._open_lock()
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                installer = os.pread(lock, 32, 0).decode(errors="replace")
                if not installer:
                    raise InstallError(
                        f"a run is using the environment of {self.backbone}, {self.folder}; wait until the run ends or "
                        "stop it, then install again"
                    ) from None
                click.echo(f"process {installer} is installing {self.backbone}; waiting for it to finish", err=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            try:
                yield lock
            finally:
                os.ftruncate(lock, 0)
        finally:
            os.close(lock)

    def lock_for_run(self) -> None:
        """Hold the shared lock until this process ends. The lock survives `exec`.

        Raises:
            InstallError: the environment is being installed, or the lock file cannot be written.
        """
        lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InstallError(
                f"the environment of {self.backbone} in {self.folder} is being installed; wait until it is finished"
            ) from None
        os.set_inheritable(lock, True)

    def is_being_installed(self) -> bool:
        """Whether another process is installing the environment now."""
        if not self.is_incomplete():
            return False
        lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def _open_lock(self) -> int:
        file = self.link.with_name(f".{self.link.name}.lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InstallError(
                f"cannot write to {file.parent} ({error.strerror}); set {FOLDER_VARIABLE} to a folder that is writable"
            ) from error
