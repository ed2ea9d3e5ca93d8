"""verl's FSDP engine with micro-batches of bounded cost, and with packed rows without flash-attention.

verl packs a micro-batch's rows only with flash-attention, and bounds the number of tokens in padded micro-batches
without their padding. Here, the bound includes the padding. Models that support packed attention compute the rows of a
micro-batch as one sequence without padding, and their common prefixes once where that is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.utils import prepare_micro_batches

from astuner.backbone.packing.packed_attention import (
    PackCosts,
    count_pack_costs,
    enable_packed_attention,
    packed_inputs,
    supports_packing,
)
from astuner.backbone.packing.row_bins import (
    RowGroup,
    divide_groups,
    largest_count,
    packed_bins,
    padded_bins,
    padded_budget,
    prefix_bins,
)
from astuner.context_tracker.packing import Packing, encode_ids, pack_encoded, pack_separate

PACK = "astuner_pack"
"""Key of a batch's `update.pack`."""
_SHOULD_SHARE, _SHARES = "astuner_should_share", "astuner_shares"


def register() -> None:
    """Make verl use this engine for language models instead of its FSDP engine."""
    engines = EngineRegistry._engines["language_model"]
    for strategy in ("fsdp", "fsdp2"):
        engines[strategy] = dict.fromkeys(engines[strategy], TrainingEngine)
    fsdp.prepare_micro_batches = _micro_batches


class TrainingEngine(fsdp.FSDPEngineWithLMHead):
    """verl's FSDP engine of a language model; `pack_costs` is None if it does not use packed attention."""

    pack_costs: PackCosts | None = None
    _computed_tokens = 0

    def _build_module(self) -> Any:
        module = super()._build_module()
        config, model = self.engine_config, self.model_config
        # verl's fused head and sequences of a fixed length need the logits of all tokens.
        if model.use_remove_padding and not (model.use_fused_kernels or config.pad_to_length or self.use_ulysses_sp):
            self.enable_packing(module)
        return module

    def enable_packing(self, module: Any) -> None:
        """Compute packed rows with packed attention, if the model supports it."""
        enable_packed_attention(module)
        if supports_packing(module):
            self.pack_costs = count_pack_costs(module, torch.device(get_device_name()))

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Compute a mini-batch, as verl's engine, in micro-batches of bounded cost."""
        tensordict_utils.assign_non_tensor(data, **{_SHOULD_SHARE: self._should_share(data)})
        return super().forward_backward_batch(data, loss_function, forward_only)

    def _should_share(self, data: TensorDict) -> Callable[[Packing], bool] | None:
        """Return the function that decides whether the prefixes of rows are computed once; None if they never are."""
        mode = tensordict_utils.get(data, PACK, "leaf")
        if self.pack_costs is None or not tensordict_utils.get(data, "use_remove_padding", True):
            return None
        if mode == "tree":
            return lambda packing: True
        return self.pack_costs.is_cheaper_packed if mode == "auto" else None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's arguments, and the arguments for `prepare_model_outputs`."""
        if self.pack_costs is None or not tensordict_utils.get(micro_batch, "use_remove_padding", True):
            inputs, arguments = super().prepare_model_inputs(micro_batch)
            # With Ulysses, each process has a part of the rows.
            self._computed_tokens = inputs["input_ids"].numel() * self.ulysses_sequence_parallel_size
            return inputs, arguments
        rows = micro_batch["input_ids"]
        pack = pack_encoded if tensordict_utils.get(micro_batch, _SHARES, False) else pack_separate
        packing = pack(_encoded(rows))
        self._computed_tokens = len(packing.token_ids)
        nodes = torch.from_numpy(np.concatenate(packing.places)).to(rows.device)
        predicted = _predicted_places(micro_batch)
        temperature = micro_batch["temperature"]
        return packed_inputs(packing, nodes[predicted]), {
            "temperature_is_one": fsdp._is_scalar_unit_temperature(temperature),
            "temperature_rmpad": torch.full(predicted.shape, float(temperature), device=rows.device),
            "input_ids_rmpad_rolled": rows.values()[predicted + 1],
            "pad_size": 0,
            "predicted": predicted,
        }

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return nested tensors with a value for each row token, 0 where no value is needed."""
        predicted = output_args.get("predicted")
        if predicted is None:
            outputs: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return outputs
        # verl computes the values of the logits as those of a single row.
        options = {
            name: tensordict_utils.get(micro_batch, name, False)
            for name in ("calculate_entropy", "calculate_sum_pi_squared")
        }
        row = torch.nested.as_nested_tensor([predicted], layout=torch.jagged)
        single = tensordict_utils.get_tensordict({"input_ids": row}, {"use_remove_padding": True, **options})
        values = super().prepare_model_outputs(output, output_args, single, logits_processor_func)
        rows = micro_batch["input_ids"]

        def of_rows(found: Tensor) -> Tensor:
            empty = torch.zeros(rows.values().shape, dtype=found.dtype, device=found.device)
            placed = empty.index_put((predicted,), found.values())
            return torch.nested.nested_tensor_from_jagged(placed, rows.offsets())

        return {name: of_rows(found) for name, found in values.items()}

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute a micro-batch, and add the number of computed tokens to the loss metrics."""
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if loss_function is not None:
            output["metrics"]["computed_tokens"] = float(self._computed_tokens)
        return loss, output


def _encoded(rows: Tensor) -> list[bytes]:
    return [encode_ids(row.cpu().numpy()) for row in rows.unbind()]


def _predicted_places(micro_batch: TensorDict) -> Tensor:
    """Return the index, among all rows' tokens, of each token before a trained one; [predicted] int64."""
    rows, mask = micro_batch["input_ids"], micro_batch["loss_mask"]
    places = []
    for end, counts in zip(rows.offsets()[1:], mask.unbind(), strict=True):
        # The mask is that of the response, which ends with the row.
        trained = counts.nonzero().flatten()
        places.append(end - len(counts) + trained - 1)
    predicted = torch.cat(places)
    # Every process must compute a gradient, also of rows that train nothing; the loss ignores this value.
    return predicted if len(predicted) else rows.offsets()[:1]


def _micro_batches(data: TensorDict, dp_group: Any = None, **options: Any) -> tuple[list[TensorDict], Any]:
    """Divide rows into micro-batches whose computed tokens are bounded, equally many in each data-parallel process."""
    packs = tensordict_utils.get(data, "use_remove_padding", True)
    should_share = tensordict_utils.get(data, _SHOULD_SHARE, None)
    is_dynamic = tensordict_utils.get(data, "use_dynamic_bsz", True)
    if not is_dynamic or (packs and should_share is None):
        # verl bounds the number of tokens, which is what packed rows compute.
        batches, numbers = prepare_micro_batches(data, dp_group, **options)
        return batches, numbers
    rows = data["input_ids"]
    lengths = rows.offsets().diff().tolist()
    budget = data["max_token_len_per_gpu"] * tensordict_utils.get(data, "sp_size", 1)
    if should_share is None:
        bins = padded_bins(range(len(lengths)), lengths, padded_budget(budget, torch.device(get_device_name())))
        groups = [RowGroup(list(each.rows)) for each in bins]
    else:
        shared, separate = prefix_bins(_encoded(rows), budget, should_share)
        groups = [RowGroup(list(each.rows), shares=True) for each in shared]
        groups += [RowGroup(group) for group in packed_bins([*chain(*separate)], lengths, budget)]
    divide_groups(groups, largest_count(len(groups), dp_group, get_device_name()))
    batches = [tensordict_utils.index_select_tensor_dict(data, group.rows) for group in groups]
    for batch, group in zip(batches, groups, strict=True):
        tensordict_utils.assign_non_tensor(batch, **{_SHARES: group.shares})
    return batches, [group.rows for group in groups]
