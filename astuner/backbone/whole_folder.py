"""Folders that a kill at any moment leaves whole or not there at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from astuner.errors import RecordError

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""What a full disk makes PyTorch and safetensors raise."""


@contextlib.contextmanager
def written_whole(final: Path, what: str, advice: str) -> Iterator[Path]:
    """Give a new folder beside `final` to write to, which takes its place at the end of the block.

    An earlier folder of that name goes only then.

    Args:
        final: its place.
        what: names it in messages.
        advice: what to do where it cannot be written.

    Raises:
        RecordError: it cannot be written; an earlier one is untouched.
    """
    partial = final.with_name(f".partial_{final.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _put_in_place(partial, final)
    except WRITE_ERRORS as error:
        free = free_space(final.parent)
        raise RecordError(f"{what} could not be written to {final}: {error} ({free}). {advice}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_synced(state: Any, file: Path) -> None:
    """Write what `torch.save` takes, and have it on the disk on return."""
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def free_space(folder: Path) -> str:
    """Say how much space is left where `folder` is or would be; PyTorch's own errors hide a full disk."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return f"{shutil.disk_usage(there).free / 2**20:.1f} MiB are free there"


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`; an earlier one of that name goes only when the new one is in its place."""
    earlier = final.with_name(f".earlier_{final.name}")
    shutil.rmtree(earlier, ignore_errors=True)
    if final.exists():
        final.rename(earlier)
    partial.rename(final)
    shutil.rmtree(earlier, ignore_errors=True)
