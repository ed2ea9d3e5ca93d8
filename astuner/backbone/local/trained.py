"""The logprobs that an update computed, for the run's record."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from astuner.backbone.local.micro_batches import MicroBatch
from astuner.backbone.rows import Row
from astuner.backbone.sample_updates import SampleKey


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
