"""How many threads PyTorch computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Operations on a model this small are so short that threads mostly wait for one another. On an idle machine a second
# thread saves a third of the time at best; beside other busy processes (an agent's tools, say) it takes ten
# times as long, since each operation waits until the slower thread gets a core.
_SMALL_MODEL = 5_000_000


@contextlib.contextmanager
def threads_for(parameters: int, device: torch.device) -> Iterator[None]:
    """Compute with one thread during the block if the model is small and on the CPU.

    Args:
        parameters: number of the model's weights.
        device: where it computes.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and parameters < _SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
