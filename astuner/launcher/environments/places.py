"""Where environments are, and what is written down about each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from astuner.errors import InstallError

FOLDER_VARIABLE = "ASTUNER_ENVIRONMENTS"
_RECEIPT = "astuner-environment.json"
_STARTED = "astuner-environment.unfinished"


def environments_folder() -> Path:
    """Return the folder of all environments: $ASTUNER_ENVIRONMENTS, or astuner/environments in the user's data."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "astuner" / "environments"


@dataclass(frozen=True)
class Receipt:
    """What an environment was made of; written last, so that it stands for one that was finished.

    Attributes:
        recipe: its name.
        digest: of the recipe's pins.
        source: astuner's, as pip was asked for it.
        editable: whether that is a checkout.
        version: astuner's.
        python: such as 3.11.7.
        extra: the user's requirement files, absolute.
        extra_digest: SHA-256 of their contents.
        seconds: that the installation took.
        size: bytes on the disk.
    """

    recipe: str
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
class Place:
    """The environment of a backbone, made or not.

    Attributes:
        backbone: its name.
        link: the environment's folder, or a link to it.
    """

    backbone: str
    link: Path

    @staticmethod
    def of(backbone: str) -> Place:
        """Return a backbone's place."""
        return Place(backbone, environments_folder() / backbone)

    @property
    def folder(self) -> Path:
        """Where it really is."""
        return self.link.resolve()

    @property
    def python(self) -> Path:
        """Its interpreter; the link that makes it the environment's must not be followed."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """What pip or uv said."""
        return self.link.with_name(f"{self.link.name}.log")

    def receipt(self) -> Receipt | None:
        """Return its receipt; None where there is no finished environment."""
        try:
            found = json.loads((self.folder / _RECEIPT).read_text())
            return Receipt(**{**found, "extra": tuple(found["extra"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def is_unfinished(self) -> bool:
        """Whether an installation began there and did not end."""
        return (self.folder / _STARTED).exists()

    def begin(self) -> None:
        """Note that what is there cannot be relied on from now on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _STARTED).touch()
        (self.folder / _RECEIPT).unlink(missing_ok=True)

    def finish(self, receipt: Receipt) -> None:
        """Write the receipt."""
        new = self.folder / f"{_RECEIPT}.new"
        new.write_text(json.dumps(asdict(receipt), indent=1) + "\n")
        new.replace(self.folder / _RECEIPT)
        (self.folder / _STARTED).unlink(missing_ok=True)

    def is_ours(self) -> bool:
        """Whether the folder may be deleted: absent, empty, or made by `astuner install`."""
        return not self.folder.exists() or any(
            (
                (self.folder / _RECEIPT).exists(),
                self.is_unfinished(),
                self.folder.is_dir() and not any(self.folder.iterdir()),
            )
        )

    @contextlib.contextmanager
    def kept_for_installing(self) -> Iterator[int]:
        """Keep every other process from installing or using it; wait while somebody installs.

        Yields:
            The lock's file descriptor: a child that inherits it keeps the lock, also when this process is killed.

        Raises:
            InstallError: a run is using it.
        """
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode(errors="replace")
                if not holder:
                    raise InstallError(
                        f"a run is using the environment of {self.backbone}, {self.folder}; wait until it ends, or "
                        "stop it, and install again"
                    ) from None
                click.echo(f"process {holder} is installing {self.backbone}; waiting until it ends", err=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            try:
                yield lock
            finally:
                os.ftruncate(lock, 0)

    def keep_for_running(self) -> None:
        """Keep others from installing there until this process ends, also when it becomes another program.

        Raises:
            InstallError: somebody is installing there.
        """
        lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InstallError(being_installed(self)) from None
        os.set_inheritable(lock, True)

    def is_being_installed(self) -> bool:
        """Whether somebody is installing there at this moment."""
        if not self.is_unfinished():
            return False
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        lock = self._open_lock()
        try:
            yield lock
        finally:
            os.close(lock)

    def _open_lock(self) -> int:
        file = self.link.with_name(f".{self.link.name}.lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InstallError(
                f"{file.parent} cannot be written ({error.strerror}); choose another folder for environments by "
                f"setting {FOLDER_VARIABLE}"
            ) from error


def being_installed(place: Place) -> str:
    """Say that somebody is installing a backbone, which nobody can use yet."""
    return (
        f"the environment of {place.backbone} is being installed just now, in {place.folder}; wait until that is done"
    )
