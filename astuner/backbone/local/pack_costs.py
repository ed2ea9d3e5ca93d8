"""Whether packing a micro-batch pays: what it costs to compute, measured on the model itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from astuner.backbone.local.packed import packed_logits
from astuner.context_tracker import Packing, pack

_SHORT, _LONG, _PIECES, _REPEATS = 128, 512, 32, 3


@dataclass(frozen=True)
class PackCosts:
    """Seconds that a forward pass takes; a backward pass takes some fixed multiple of each.

    Attributes:
        token: for each token.
        pair: for each pair of tokens that an attention kernel looks at: half the square for a causal one, all with
            a mask.
        batch: for each batch of pieces of a packing, whose attention is a call of its own.
    """

    token: float
    pair: float
    batch: float

    def packed(self, packing: Packing) -> float:
        """Return the seconds for a packing."""
        pairs = 0.0
        for batch in packing.batches:
            piece = packing.pieces[batch[0]]
            seen = piece.depth + piece.size if piece.path else piece.size / 2
            pairs += len(batch) * piece.size * seen
        return self.token * len(packing.token_ids) + self.pair * pairs + self.batch * len(packing.batches)

    def apart(self, packing: Packing) -> float:
        """Return the seconds for its sequences as rows of their own; those of like length are padded together."""
        lengths = [len(places) for places in packing.places]
        return sum(self.token * length + self.pair * length * length / 2 for length in lengths)

    def pays(self, packing: Packing) -> bool:
        """Whether the packing is the cheaper of the two."""
        return self.packed(packing) < self.apart(packing)


def measure_pack_costs(model: Any, longest: int) -> PackCosts:
    """Time forward passes of a model that takes packings.

    Args:
        model: prepared by `packed.enable`.
        longest: the most positions that it knows.
    """
    long = min(_LONG, longest)
    short = max(long // 4, 1)
    device = next(model.parameters()).device

    def forward(packing: Packing) -> Callable[[], object]:
        last = torch.tensor([len(packing.token_ids) - 1], device=device)
        return lambda: packed_logits(model, packing, last)

    # Each goes on where the last but one ends, so that no two can be computed together.
    size = max(short // _PIECES, 2)
    many = pack([[0] * (size * number) + [1] * size for number in range(1, _PIECES)])
    one, longer = pack([[0] * short]), pack([[0] * long])
    seconds_many, seconds_short, seconds_long = (_seconds(forward(packing)) for packing in (many, one, longer))
    # Two lengths give the line and the parabola; rounding must not make either negative.
    pair = max((seconds_long - seconds_short * long / short) / (long * (long - short) / 2), 0.0)
    token = max((seconds_short - pair * short * short / 2) / short, 1e-12)
    without = PackCosts(token, pair, 0.0)
    return PackCosts(token, pair, max((seconds_many - without.packed(many)) / len(many.batches), 0.0))


@torch.no_grad()
def _seconds(compute: Callable[[], object]) -> float:
    compute()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        compute()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
