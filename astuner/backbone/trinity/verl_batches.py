"""Mini-batches as verl's workers take them: rows of one length, as many for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trinity.common.experience import Experience
from trinity.trainer.trainer import Trainer

from astuner.backbone.trinity.credit import CALLS, COUNTS, REFERENCE, SCALE, idle
from astuner.backbone.trinity.experiences import STEP


class WholeBatchTrainer(Trainer):
    """Trinity's trainer with verl's workers, in which each step is one optimiser step over all that it was given.

    The stock one cuts what it is given into parts of `buffer.train_batch_size` and has an optimiser step for each.
    """

    async def train_step(self, exps: list[Experience]) -> dict[str, Any]:
        """Learn from a mini-batch."""
        cluster = self.config.cluster
        gpus = cluster.trainer_node_num * cluster.trainer_gpu_num_per_node
        rows = for_workers(exps, gpus // self.config.trainer.ulysses_sequence_parallel_size)
        self.engine.config.actor.ppo_mini_batch_size = len(rows)
        metrics: dict[str, Any] = await super().train_step(rows)
        return metrics


def for_workers(experiences: Sequence[Experience], workers: int) -> list[Experience]:
    """Return a mini-batch's experiences, changed in place, and such as fill up and train nothing.

    Args:
        experiences: as `EpisodeAdvantages` made them.
        workers: data-parallel ones, whose gradients are averaged.
    """
    count = len(experiences)
    first = experiences[0]
    # Without a reference the experiences bring zeros in its place.
    computed = REFERENCE not in first.info
    fill = [idle(first.info[STEP], first, reference=computed) for _ in range(-count % workers)]
    rows = [*experiences, *fill]
    tokens, calls = (max(len(one.info[key]) for one in rows) for key in (COUNTS, CALLS))
    for one in rows:
        one.info[COUNTS] = _padded(one.info[COUNTS], tokens, 0)
        one.info[CALLS] = _padded(one.info[CALLS], calls, (0, 0))
        # The weights were made for a trainer that takes the mean over experiences.
        one.info[SCALE] = [one.info[SCALE][0] / count * workers]
        if not computed:
            one.info[REFERENCE] = _padded(one.info[REFERENCE], tokens, 0.0)
        one.custom_fields = [
            replace(field, destination_field="ref_log_prob") if field.source_field == REFERENCE else field
            for field in one.custom_fields
        ]
    return rows


def _padded(values: Sequence[Any], length: int, filling: object) -> list[Any]:
    return [*values, *[filling] * (length - len(values))]
