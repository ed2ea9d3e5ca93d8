"""The run record's account of an update: the advantages and logprobs of each sample's trained tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from astuner.algorithms.training_rows import TrainingRow
from astuner.run_record import SampleUpdate, count_trained_tokens
from astuner.schema import Episode, Sample

SampleKey = tuple[int, int]
"""Index of an episode, and of a sample within it."""


def sample_updates(
    episodes: Sequence[Episode], rows: Sequence[TrainingRow], logprobs: Mapping[SampleKey, tuple[float, ...]]
) -> tuple[tuple[SampleUpdate, ...], ...]:
    """Return how each sample of each episode was trained.

    Args:
        episodes: E episodes.
        rows: the trained rows, with advantages. A sample without a row, for example of a group that the algorithm
            leaves out, has advantage 0.
        logprobs: the trainer's logprobs of each sample's trained tokens, in order, where the update computed them.
    """
    row_of = {(row.episode, row.sample): row for row in rows}
    return tuple(
        tuple(
            SampleUpdate(_advantage_runs(sample, row_of.get((index, number))), logprobs.get((index, number)))
            for number, sample in enumerate(episode.samples)
        )
        for index, episode in enumerate(episodes)
    )


def _advantage_runs(sample: Sample, row: TrainingRow | None) -> tuple[tuple[int, float], ...]:
    """Return the advantages of the trained tokens, in order, as (number of tokens, advantage)."""
    advantages = set(row.advantages) if row else {0.0}
    if len(advantages) == 1:
        return ((count_trained_tokens(sample), advantages.pop()),)
    assert row is not None
    # The same order of assignment as in `token_advantages`.
    table = [0.0] * len(sample.token_ids)
    for (start, end), advantage in zip(row.calls, row.advantages, strict=True):
        table[start:end] = [advantage] * (end - start)
    values = (advantage for advantage, count in zip(table, sample.train_counts, strict=True) if count)
    return tuple((len(list(run)), advantage) for advantage, run in groupby(values))
