"""The run record's data of an update: advantages, logprobs and entropies of each sample's trained tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from astuner.algorithms.training_rows import TrainingRow, token_advantages
from astuner.run_record.updates import SampleUpdate, count_trained_tokens
from astuner.schema import Episode, Floats, Sample

SampleKey = tuple[int, int]
"""Index of an episode, and of a sample within it."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values that an update computes for the M trained tokens of a sample, in order.

    Attributes:
        logprobs: [M] float32, log-probabilities of the tokens.
        entropies: [M] float32, entropies in nats of the distributions from which they were sampled.
    """

    logprobs: Floats
    entropies: Floats


def sample_updates(
    episodes: Sequence[Episode], rows: Sequence[TrainingRow], values: Mapping[SampleKey, TokenValues]
) -> tuple[tuple[SampleUpdate, ...], ...]:
    """Return an update record for each sample, grouped by episode.

    Args:
        episodes: E episodes.
        rows: the trained rows, with advantages. A sample without a row, for example of a group that the algorithm
            leaves out, has advantage 0.
        values: the trainer's values of each sample's trained tokens, where the update computed them.
    """
    row_of = {(row.episode, row.sample): row for row in rows}
    return tuple(
        tuple(
            _sample_update(sample, row_of.get((index, number)), values.get((index, number)))
            for number, sample in enumerate(episode.samples)
        )
        for index, episode in enumerate(episodes)
    )


def _sample_update(sample: Sample, row: TrainingRow | None, values: TokenValues | None) -> SampleUpdate:
    advantages = _advantage_runs(sample, row)
    return SampleUpdate(advantages) if values is None else SampleUpdate(advantages, values.logprobs, values.entropies)


def _advantage_runs(sample: Sample, row: TrainingRow | None) -> tuple[tuple[int, float], ...]:
    """Return the trained tokens' advantages, in order, as (number of tokens, advantage)."""
    advantages = set(row.advantages) if row else {0.0}
    if len(advantages) == 1 and (row is None or row.teacher_advantages is None):
        return ((count_trained_tokens(sample), advantages.pop()),)
    assert row is not None
    table = token_advantages([row], len(sample.token_ids))[0].tolist()
    values = (advantage for advantage, count in zip(table, sample.train_counts, strict=True) if count)
    return tuple((len(list(run)), advantage) for advantage, run in groupby(values))
