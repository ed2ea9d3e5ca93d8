"""verl's driver alone: it prepares and sends the rows of an update, but no worker stores or trains them.

Imported only where verl is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from astuner.algorithms.correction import CORRECTION_SUMS
from astuner.algorithms.policy_batch import LossMetrics
from astuner.backbone.verl import trainer as trainer_module
from astuner.backbone.verl.trainer import VerlTrainer

_SUMS = [
    *("loss/policy", "loss/kl", "loss/total", "entropy", "grad_norm", "compared_tokens", "rollout_kl"),
    *(f"ratio/{name}" for name in LossMetrics.__slots__),
    *(f"correction/{name}" for name in CORRECTION_SUMS),
]


@dataclass
class Queue:
    """Takes the requests to TransferQueue, and keeps no row.

    Attributes:
        keys: the keys of each request that stored fields.
        sizes: the bytes of each request.
        fields: the names of all fields.
    """

    keys: list[list[str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict, tags: Any) -> None:
        assert fields.batch_size == (len(keys),)
        assert tags is None or len(tags) == len(keys)
        self.keys.append(keys)
        values = [(value.values() if value.is_nested else value) for value in fields.values()]
        self.sizes.append(sum(value.nbytes for value in values))
        self.fields.update(fields.keys())

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        pass


class DriverTrainer(VerlTrainer):
    """A trainer without workers. An update returns random values for the trained tokens, as verl returns them."""

    workers = 1
    recomputes_old_logprobs = False
    shares_prefixes = True

    def __init__(self, trained: int) -> None:
        """Set the number of trained tokens of each row."""
        self._trained = trained

    def reference_logprobs(self, keys: list[str], lengths: list[int]) -> list[Tensor]:
        return [torch.from_numpy(np.zeros(self._trained, np.float32)) for _ in keys]

    def update(self, keys: list[str], lengths: list[int], mini_batch_size: int, rate: float) -> dict[str, Any]:
        count = len(keys)
        numbers = np.array([int(key.rpartition("-")[2]) for key in keys])
        values = np.linspace(-1, 0, count * self._trained, dtype=np.float32)
        sums = dict.fromkeys(_SUMS, 1.0) | {"logprob_difference": 0.0, "computed_tokens": float(sum(lengths))}
        tokens = {"rows": numbers, "counts": np.full(count, self._trained), "logprobs": values, "entropies": -values}
        # verl's metrics are lists over the mini-batches.
        return {name: [value] for name, value in (sums | {f"tokens/{k}": v for k, v in tokens.items()}).items()}


@contextlib.contextmanager
def queue_replaced() -> Iterator[Queue]:
    """Send the rows of a trainer nowhere during the block."""
    queue = Queue()
    with mock.patch.object(trainer_module, "tq", queue):
        yield queue
