"""Training rows: a tracker's samples with the credit of their calls, whatever trains on them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.backbone.algorithms import LossAggMode, sample_scales
from astuner.schema import Sample


@dataclass(frozen=True)
class Row:
    """One sequence to train on; all per-token sequences have length N.

    Attributes:
        token_ids: N ids.
        loss_mask: N counts: how often each token is trained; 0 for context.
        logprobs: N log-probabilities as sampled; empty for transcripts.
        old_logprobs: N log-probabilities that ratios are taken to, in the place of `logprobs`; empty for those.
        calls: (start, end) of each LLM call's completion; empty for transcripts.
        call_ids: the ids of those calls.
        advantages: the advantages of those calls, once they are known.
        episode: index of the row's episode in its batch.
        sample: index of the sample, within its episode, that the row was made of.
    """

    token_ids: Sequence[int] | NDArray[np.int32]
    loss_mask: Sequence[int] | NDArray[np.int32]
    logprobs: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    calls: Sequence[tuple[int, int]] = ()
    call_ids: Sequence[str] = ()
    advantages: Sequence[float] = ()
    episode: int = 0
    sample: int = 0

    @staticmethod
    def of_sample(sample: Sample, episode: int, number: int = 0) -> Row:
        """Make a row of a tracker's sample, which must be no tree: the `number`-th of its episode."""
        assert sample.parents is None
        return Row(
            sample.token_ids,
            sample.loss_mask,
            sample.logprobs,
            calls=[(span.start, span.end) for span in sample.spans],
            call_ids=[span.call_id for span in sample.spans],
            episode=episode,
            sample=number,
        )

    def with_advantages(self, whole: float, own: Mapping[str, float]) -> Row:
        """Return the row with the advantages of its calls: `own` by call id, for all others that of the episode."""
        return replace(self, advantages=[own.get(call_id, whole) for call_id in self.call_ids])

    @property
    def has_advantage(self) -> bool:
        """Whether any of its calls has one."""
        return any(self.advantages)


def prompt_length(sample: Sample) -> int:
    """Return the tokens before the first trained one; a call's prompt is never empty, so there is one."""
    return min(span.start for span in sample.spans)


def token_advantages(rows: Sequence[Row], length: int) -> Tensor:
    """[B, length] float32. Calls that share a token have one reward, see `build_samples`, so one advantage too."""
    table = torch.zeros((len(rows), length))
    for place, row in enumerate(rows):
        for (start, end), advantage in zip(row.calls, row.advantages, strict=False):
            table[place, start:end] = advantage
    return table


def mini_batches(rows: Sequence[Row], wanted: int, seed: str) -> list[list[int]]:
    """Deal the episodes, shuffled by `seed`, into `wanted` parts or as many as there are episodes.

    Returns:
        For each part, the places of its rows in `rows`, in order; an episode's rows stay together.
    """
    episodes = sorted({row.episode for row in rows})
    count = min(wanted, len(episodes))
    random.Random(seed).shuffle(episodes)
    part = {episode: index % count for index, episode in enumerate(episodes)}
    batches: list[list[int]] = [[] for _ in range(count)]
    for place, row in enumerate(rows):
        batches[part[row.episode]].append(place)
    return batches


def row_scales(rows: Sequence[Row], mode: LossAggMode, max_response_length: int) -> Tensor:
    """Return the factor of each row's loss mask, [rows] float32, for the rows of a whole mini-batch.

    Raises:
        BackboneError: no token of the mini-batch is trained.
    """
    trained = torch.tensor([sum(row.loss_mask) for row in rows])
    return sample_scales(trained, torch.tensor([row.episode for row in rows]), mode, max_response_length)
