"""Which experiences a trainer step takes: those of one whole mini-batch (`sample_strategy`).

Trinity's own strategies take a fixed number of experiences. Episodes have any number of them, so that a step would
wait for some that never come, or take part of an episode, or leave more and more behind.
"""

from __future__ import annotations

from typing import Any

from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.buffer import get_buffer_reader
from trinity.common.experience import Experience
from trinity.utils.timer import Timer

from astuner.backbone.trinity.certificate import digest
from astuner.backbone.trinity.credit import COUNT
from astuner.backbone.trinity.desk import desk
from astuner.backbone.trinity.experiences import EPISODE, SAMPLE
from astuner.backbone.trinity.news import Taken


class WholeMiniBatches(SampleStrategy):
    """Takes mini-batches in the order in which they come."""

    def __init__(self, buffer_config: Any, updates: int, **_: Any) -> None:
        """Read from the experience buffer.

        Args:
            buffer_config: Trinity's.
            updates: optimiser steps of a training step.
        """
        super().__init__(buffer_config)
        self._updates = updates
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)

    async def sample(self, step: int, **_: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """Return a mini-batch; the wait for it, and how many training steps ago it was sampled; and nothing to show."""
        measured: dict[str, float] = {}
        with Timer(measured, "time/read_experience"):
            taken = await self._reader.read(batch_size=1)
            if taken[0].info[COUNT] > 1:
                taken += await self._reader.read(batch_size=taken[0].info[COUNT] - 1)
        digests = {
            (one.info[EPISODE], one.info[SAMPLE]): digest(
                one.tokens.tolist(), one.action_mask.tolist(), one.logprobs.tolist()
            )
            for one in taken
            if one.action_mask.any()
        }
        await desk().post.remote(Taken(step, digests))
        now = (step - 1) // self._updates
        ages = [now - max(one.info["model_version"], 0) // self._updates for one in taken]
        measured |= {"staleness/max": float(max(ages)), "staleness/mean": sum(ages) / len(ages)}
        return taken, measured, []

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to go on from: what was not trained is sampled again."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""
