"""verl's FSDP worker under Trinity, with padded micro-batches of bounded cost.

verl 0.8 bounds the tokens of a padded micro-batch without its padding. Here, the bound includes the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp
from tensordict import TensorDict
from torch import Tensor
from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker
from verl.single_controller.base import decorator
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine import EngineRegistry
from verl.workers.engine.utils import prepare_micro_batches

from astuner.backbone.packing.row_bins import RowGroup, divide_groups, largest_count, padded_bins, padded_budget


class BoundedWorker(TrinityActorRolloutRefWorker):
    """Trinity's worker with `BoundedEngine`."""

    @decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model."""
        register()
        super().init_model()


def register() -> None:
    """Make verl use `BoundedEngine` for language models in this process."""
    engines = EngineRegistry._engines["language_model"]
    for strategy in ("fsdp", "fsdp2"):
        engines[strategy] = dict.fromkeys(engines[strategy], BoundedEngine)
    fsdp.prepare_micro_batches = _micro_batches


class BoundedEngine(fsdp.FSDPEngineWithLMHead):
    """verl's FSDP engine for a language model, which adds the number of computed tokens to the loss metrics."""

    _computed_tokens = 0

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's arguments, and the arguments for `prepare_model_outputs`."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        # With Ulysses, each process has a part of the rows.
        self._computed_tokens = inputs["input_ids"].numel() * self.ulysses_sequence_parallel_size
        return inputs, arguments

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute a micro-batch."""
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if loss_function is not None:
            output["metrics"]["computed_tokens"] = Metric(AggregationType.SUM, float(self._computed_tokens))
        return loss, output


def _micro_batches(data: TensorDict, dp_group: Any = None, **options: Any) -> tuple[list[TensorDict], Any]:
    """Divide rows into micro-batches whose computed tokens are bounded, equally many in each data-parallel process."""
    packs = tensordict_utils.get(data, "use_remove_padding", True)
    if packs or not tensordict_utils.get(data, "use_dynamic_bsz", True):
        # verl bounds the number of tokens, which is what packed rows compute.
        batches, numbers = prepare_micro_batches(data, dp_group, **options)
        return batches, numbers
    device = get_device_name()
    lengths = data["input_ids"].offsets().diff().tolist()
    budget = padded_budget(data["max_token_len_per_gpu"], torch.device(device))
    groups = [RowGroup(list(each.rows)) for each in padded_bins(range(len(lengths)), lengths, budget)]
    divide_groups(groups, largest_count(len(groups), dp_group, device))
    numbers = [group.rows for group in groups]
    return [tensordict_utils.index_select_tensor_dict(data, rows) for rows in numbers], numbers
