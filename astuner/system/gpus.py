"""This machine's GPUs, or a described machine's (`astuner check --machine`). PyTorch is not imported."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from astuner.errors import ConfigError

_FORM = re.compile(r"([1-9]\d{0,5})x(\w[\w.]*)-(\d+(?:\.\d+)?)G(?:i?B)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with equal GPUs.

    Attributes:
        gpus: number of GPUs.
        name: their type, for messages.
        memory: bytes of one GPU.
    """

    gpus: int
    name: str
    memory: int

    @staticmethod
    def parse(text: str) -> Machine:
        """Read a text such as `8xH100-80G`: number, type, and GiB of a GPU.

        Raises:
            ConfigError: the text has another form.
        """
        match = _FORM.fullmatch(text)
        if match is None or float(match[3]) == 0:
            raise ConfigError(
                f"--machine is {text!r}; expected NUMBERxTYPE-MEMORYG, such as 8xH100-80G or 1xL4-24G: the number of "
                "GPUs, their type, and GiB per GPU"
            )
        return Machine(int(match[1]), match[2], int(float(match[3]) * 2**30))


_described: ContextVar[int | None] = ContextVar("described_gpus", default=None)


@contextlib.contextmanager
def described_gpus(count: int) -> Iterator[None]:
    """Check configurations in the block as on a machine with `count` GPUs (`astuner check --machine`)."""
    token = _described.set(count)
    try:
        yield
    finally:
        _described.reset(token)


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES shows to this process."""
    described = _described.get()
    if described is not None:
        return described
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return installed_gpus()
    # CUDA ignores all entries after the first one that is not a device.
    names = [name.strip() for name in shown.split(",")]
    valid = 0
    for name in names:
        if not name or name.startswith("-"):
            break
        valid += 1
    return min(valid, installed_gpus())


def installed_gpus() -> int:
    """Return how many NVIDIA GPUs with a working driver this machine has."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    devices = Path("/proc/driver/nvidia/gpus")
    return len(list(devices.iterdir())) if devices.is_dir() else 0
