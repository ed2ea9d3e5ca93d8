"""Operations of PyTorch that compute the same bits each time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic_operations(device: torch.device) -> Iterator[None]:
    """Make PyTorch choose deterministic kernels in the block, and keep the number of CPU threads.

    Sums then have a fixed order. An operation without a deterministic kernel raises an error. See
    https://docs.pytorch.org/docs/stable/notes/randomness.html.

    Args:
        device: the device of the computation; on CUDA, cuBLAS gets a workspace that no other stream uses.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_num_threads(threads)
