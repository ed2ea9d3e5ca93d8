"""Measured costs of packed and separate rows, which decide whether a micro-batch is packed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from astuner.backbone.local.packed_attention import packed_logits
from astuner.context_tracker import Packing, pack

_SHORT, _LONG, _PIECES, _REPEATS = 128, 512, 32, 3


@dataclass(frozen=True)
class PackCosts:
    """Coefficients of the estimated time of a forward pass. A backward pass takes a fixed multiple of that time.

    Attributes:
        per_token: seconds per token.
        per_pair: seconds per pair of tokens that an attention kernel computes. A causal kernel computes half of all
            pairs, a kernel with a mask all of them.
        per_batch: seconds per batch of pieces of a packing. The attention of each batch is a separate kernel call.
    """

    per_token: float
    per_pair: float
    per_batch: float

    def packed_seconds(self, packing: Packing) -> float:
        """Return the estimated seconds of a forward pass over a packing."""
        pairs = 0.0
        for batch in packing.batches:
            piece = packing.pieces[batch[0]]
            keys = piece.depth + piece.size if piece.path else piece.size / 2
            pairs += len(batch) * piece.size * keys
        return self.per_token * len(packing.token_ids) + self.per_pair * pairs + self.per_batch * len(packing.batches)

    def separate_seconds(self, packing: Packing) -> float:
        """Return the seconds to compute the sequences of a packing as separate rows, without padding."""
        lengths = [len(places) for places in packing.places]
        return sum(self.per_token * length + self.per_pair * length * length / 2 for length in lengths)

    def is_cheaper_packed(self, packing: Packing) -> bool:
        """Return whether a packing takes less time than separate rows."""
        return self.packed_seconds(packing) < self.separate_seconds(packing)


def measure_pack_costs(model: Any, max_length: int) -> PackCosts:
    """Measure the forward passes of a model that supports packing.

    Args:
        model: prepared by `enable_packed_attention`.
        max_length: maximum sequence length of the model.
    """
    long = min(_LONG, max_length)
    short = max(long // 4, 1)
    device = next(model.parameters()).device

    def forward(packing: Packing) -> Callable[[], object]:
        last = torch.tensor([len(packing.token_ids) - 1], device=device)
        return lambda: packed_logits(model, packing, last)

    # Each sequence extends the path of the one before it, so that no two pieces can be batched.
    size = max(short // _PIECES, 2)
    many = pack([[0] * (size * number) + [1] * size for number in range(1, _PIECES)])
    short_row, long_row = pack([[0] * short]), pack([[0] * long])
    seconds_many, seconds_short, seconds_long = (
        _median_seconds(forward(packing)) for packing in (many, short_row, long_row)
    )
    # Two lengths determine the linear and the quadratic term. Measurement noise must not make either negative.
    pair = max((seconds_long - seconds_short * long / short) / (long * (long - short) / 2), 0.0)
    token = max((seconds_short - pair * short * short / 2) / short, 1e-12)
    without_batches = PackCosts(token, pair, 0.0)
    return PackCosts(token, pair, max((seconds_many - without_batches.packed_seconds(many)) / len(many.batches), 0.0))


@torch.no_grad()
def _median_seconds(compute: Callable[[], object]) -> float:
    compute()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        compute()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
