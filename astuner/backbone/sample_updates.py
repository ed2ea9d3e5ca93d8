"""What an update did with each sample, token by token, for the run's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from astuner.backbone.rows import Row
from astuner.run_record import SampleUpdate, trained_tokens
from astuner.schema import Episode, Sample

SampleKey = tuple[int, int]
"""Index of an episode, and of a sample within it."""


def sample_updates(
    episodes: Sequence[Episode], rows: Sequence[Row], logprobs: Mapping[SampleKey, tuple[float, ...]]
) -> tuple[tuple[SampleUpdate, ...], ...]:
    """Return how each sample of each episode was trained.

    Args:
        episodes: E episodes.
        rows: those of the samples that the update was given, with advantages; a sample that it was not given, as of a
            group that the algorithm leaves out, had none.
        logprobs: of the trained tokens of each sample, in order, where the update computed them.
    """
    taught = {(row.episode, row.sample): row for row in rows}
    return tuple(
        tuple(
            SampleUpdate(_stretches(sample, taught.get((index, number))), logprobs.get((index, number)))
            for number, sample in enumerate(episode.samples)
        )
        for index, episode in enumerate(episodes)
    )


def _stretches(sample: Sample, row: Row | None) -> tuple[tuple[int, float], ...]:
    """Return (tokens, advantage) of the trained tokens, in order."""
    advantages = set(row.advantages) if row else {0.0}
    if len(advantages) == 1:
        return ((trained_tokens(sample), advantages.pop()),)
    assert row is not None
    # As the micro-batch has them, see `token_advantages`.
    table = [0.0] * len(sample.token_ids)
    for (start, end), advantage in zip(row.calls, row.advantages, strict=True):
        table[start:end] = [advantage] * (end - start)
    values = (advantage for advantage, mask in zip(table, sample.loss_mask, strict=True) if mask)
    return tuple((len(list(run)), advantage) for advantage, run in groupby(values))
