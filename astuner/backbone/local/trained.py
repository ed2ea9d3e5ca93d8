"""What an update did with each sample, token by token, for the run's record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from astuner.backbone.local.rows import MicroBatch, Row
from astuner.run_record import SampleUpdate, trained_tokens
from astuner.schema import Episode, Sample

SampleKey = tuple[int, int]
"""Index of an episode, and of a sample within it."""


class SeenLogprobs:
    """The logprobs that the forward passes of a step's updates computed; they stay on the device until asked for."""

    def __init__(self) -> None:
        self._seen: list[tuple[list[SampleKey], Tensor, Tensor]] = []

    def add(self, rows: Sequence[Row], batch: MicroBatch, logprobs: Tensor) -> None:
        """Keep a micro-batch's.

        Args:
            rows: what the micro-batch was cut from.
            batch: [B, T].
            logprobs: [B, T] float32, detached.
        """
        keys = [(rows[index].episode, rows[index].sample) for index in batch.rows]
        self._seen.append((keys, logprobs, batch.loss_mask))

    def by_sample(self) -> dict[SampleKey, tuple[float, ...]]:
        """Return the logprobs of each sample's trained tokens, in order."""
        found: dict[SampleKey, tuple[float, ...]] = {}
        for keys, logprobs, loss_mask in self._seen:
            trained = loss_mask.ne(0)
            values = logprobs[trained].tolist()
            end = 0
            for key, count in zip(keys, trained.sum(dim=1).tolist(), strict=True):
                found[key] = tuple(values[end : end + count])
                end += count
        return found


def sample_updates(
    episodes: Sequence[Episode], rows: Sequence[Row], seen: SeenLogprobs
) -> tuple[tuple[SampleUpdate, ...], ...]:
    """Return how each sample of each episode was trained.

    Args:
        episodes: E episodes.
        rows: those of the samples that the update was given, with advantages; a sample that it was not given, as of a
            group that the algorithm leaves out, had none.
        seen: what the update computed.
    """
    logprobs = seen.by_sample()
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
    # As the micro-batch has them, see `rows`.
    table = [0.0] * len(sample.token_ids)
    for (start, end), advantage in zip(row.calls, row.advantages, strict=True):
        table[start:end] = [advantage] * (end - start)
    values = (advantage for advantage, mask in zip(table, sample.loss_mask, strict=True) if mask)
    return tuple((len(list(run)), advantage) for advantage, run in groupby(values))
