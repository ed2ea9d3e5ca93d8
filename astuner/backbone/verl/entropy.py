"""Entropies on verl's workers without gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from verl.utils import torch_functional

from astuner.algorithms import entropy_from_logprobs

_CHUNK_ROWS = 2048


def disable_entropy_gradient() -> None:
    """Make the training engines that this process creates from now on compute entropies without gradient.

    verl's functions keep tensors of the size of the logits for the backward pass, also where no loss contains the
    entropy.
    """
    torch_functional.entropy_from_logits = torch_functional.entropy_from_logits_with_chunking = entropy_from_logits


@torch.compiler.disable
@torch.no_grad()
def entropy_from_logits(logits: Tensor, chunk_size: int = _CHUNK_ROWS) -> Tensor:
    """Return each logit row's entropy, without gradient.

    Args:
        logits: [..., V].
        chunk_size: number of rows that are computed together. It bounds the temporary memory.

    Returns:
        [...] float32, in nats.
    """
    rows = torch.split(logits.flatten(end_dim=-2), chunk_size)
    entropies = torch.cat([entropy_from_logprobs(chunk.float().log_softmax(dim=-1)) for chunk in rows])
    return entropies.view(logits.shape[:-1])
