"""The `datasets` library, imported when needed (it takes seconds) and without its progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

LOAD_ERRORS = (OSError, ValueError, RuntimeError)
"""What `datasets` raises, besides its own `DatasetsError`, for data that is missing, unreachable or malformed."""


@contextmanager
def quiet_datasets() -> Iterator[ModuleType]:
    """Give the `datasets` module; within the block, neither it nor the hub client draws progress bars."""
    import datasets
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    had_bars, hub_had_bars = not datasets.are_progress_bars_disabled(), not are_progress_bars_disabled()
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        yield datasets
    finally:
        if had_bars:
            datasets.enable_progress_bars()
        if hub_had_bars:
            enable_progress_bars()
