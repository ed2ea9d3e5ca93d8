"""The loss that verl's workers compute: astuner's algorithms on verl's batches.

verl's own losses weight all rows equally. Here, each row carries the factor of its tokens (`row_scale`), computed over
the whole mini-batch: an episode has the same weight however many rows it is split into, and padding rows have none.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from astuner.algorithms.aggregate import token_weights
from astuner.algorithms.correction import Correction, micro_batch_loss, resolve_correction, sampler_gap
from astuner.algorithms.credit_assignment import uses_kl_loss
from astuner.algorithms.kl import token_kl
from astuner.algorithms.policy_batch import CallTable, PolicyBatch
from astuner.algorithms.registry import resolve
from astuner.algorithms.training_rows import TokenValues
from astuner.config.algorithm_settings import AlgorithmConfig, KlType
from astuner.config.root import AstunerConfig
from astuner.schema import Packed


@dataclass(frozen=True)
class RowLoss:
    """Computes a micro-batch's contribution to its mini-batch's loss. verl's training engines call it.

    Attributes:
        kl_coef: coefficient of the KL to the reference model; 0 disables it.
        own_ratio: compute ratios to the current logprobs instead of `old_log_probs`. Before the first update of a step
            they are the trainer's old logprobs.
    """

    algorithm: AlgorithmConfig
    kl_coef: float
    kl_type: KlType
    correction: Correction
    own_ratio: bool

    def __call__(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: object = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, and metrics: sums over the micro-batch, and the arrays of `token_metrics`."""
        logprobs = no_padding_2_padding(model_output["log_probs"], data).float()
        entropy = no_padding_2_padding(model_output["entropy"], data)
        mask = _to_padded(data["loss_mask"])
        from_trainer = self.correction.old_from_trainer
        old = _to_padded(data["old_log_probs" if from_trainer else "rollout_log_probs"])
        batch = PolicyBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if self.own_ratio else old,
            advantages=_to_padded(data["advantages"]),
            train_counts=mask,
            calls=_call_table(data),
            sampler_logprobs=_to_padded(data["sampler_log_probs"]),
        )
        rule = resolve(self.algorithm).rule
        assert rule is not None
        is_selected = (
            entropy.detach() > data["entropy_threshold"][:, None] if self.algorithm.selects_by_entropy else None
        )
        loss, sums = micro_batch_loss(
            rule,
            self.correction,
            batch,
            token_weights(mask, data["row_scale"]),
            selected=is_selected,
            kl=token_kl(logprobs, _to_padded(data["ref_log_prob"]), self.kl_type) if self.kl_coef > 0 else None,
            kl_coef=self.kl_coef,
            entropy=entropy if self.algorithm.entropy_coef > 0 else None,
            entropy_coef=self.algorithm.entropy_coef,
        )
        # The weights of later mini-batches have been updated.
        in_first = mask * (data["mini_batch"] == 0)[:, None]
        sums |= {"entropy": (entropy * mask).sum()}
        sums |= sampler_gap(logprobs, _to_padded(data["rollout_log_probs"]), in_first)
        metrics = {name: float(value.detach()) for name, value in sums.items()}
        # FSDP averages gradients over the workers, and this loss is to be summed over them.
        return loss * data["dp_size"], metrics | token_metrics(logprobs.detach(), entropy.detach(), mask, data["row"])


def row_loss(run: AstunerConfig, dtype: torch.dtype, *, other_engine: bool) -> RowLoss:
    """Return the loss of a run, in which astuner's engine samples or an `other_engine`."""
    common = run.trainer_common
    correction = resolve_correction(run, low_precision=dtype != torch.float32, can_differ=other_engine)
    return RowLoss(
        algorithm=common.algorithm,
        kl_coef=common.kl_loss_coef if uses_kl_loss(run) else 0.0,
        kl_type=common.kl_loss_type,
        correction=correction,
        own_ratio=correction.old_from_trainer and common.mini_batch_num == 1,
    )


def _to_padded(values: Tensor) -> Tensor:
    """Return nested rows as [B, R], padded with 0 on the right."""
    return torch.nested.to_padded_tensor(values, 0) if values.is_nested else values


def _call_table(data: TensorDict) -> CallTable:
    """Return the spans of the completions in the responses. Spans of length 0 are padding."""
    starts, ends = data["call_starts"], data["call_ends"]
    sizes = torch.tensor([len(row) for row in starts.unbind()], device=starts.device)
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=starts.device), sizes)
    flat_starts, flat_ends = torch.cat(list(starts.unbind())), torch.cat(list(ends.unbind()))
    real = flat_ends > flat_starts
    return CallTable(rows[real], flat_starts[real], flat_ends[real])


def token_metrics(logprobs: Tensor, entropies: Tensor, mask: Tensor, row_numbers: Tensor) -> dict[str, np.ndarray]:
    """Return the values of the trained tokens as metrics. verl collects metrics on the driver, in a fixed order.

    Args:
        logprobs, entropies: [B, R] float.
        mask: [B, R].
        row_numbers: [B] int64, the rows' indices in the step.
    """
    trained = mask.ne(0)
    return {
        "tokens/rows": row_numbers.cpu().numpy(),
        "tokens/counts": trained.sum(dim=1).cpu().numpy(),
        "tokens/logprobs": logprobs[trained].cpu().numpy(),
        # numpy has no bfloat16, in which verl may compute entropies.
        "tokens/entropies": entropies[trained].float().cpu().numpy(),
    }


def pop_token_values(metrics: dict[str, Any]) -> dict[int, TokenValues]:
    """Remove the entries of `token_metrics` from a step's metrics, and return the values by row index."""
    rows, counts = (flatten(metrics.pop(f"tokens/{name}")).astype(int).tolist() for name in ("rows", "counts"))
    logprobs, entropies = (_packed(flatten(metrics.pop(f"tokens/{name}"))) for name in ("logprobs", "entropies"))
    ends = np.cumsum(counts, dtype=int).tolist()
    return {
        row: TokenValues(logprobs.view(end - count, end), entropies.view(end - count, end))
        for row, count, end in zip(rows, counts, ends, strict=True)
        if row >= 0
    }


def _packed(values: NDArray[np.float32]) -> Packed[float]:
    numbers = array("f", values.astype(np.float32, copy=False).tobytes())
    return Packed[float]([(numbers, 0, len(numbers))])


def flatten(values: Any) -> NDArray[Any]:
    """Return all numbers in a verl metric: arrays, and lists nested by mini-batch, worker and micro-batch."""
    if isinstance(values, list):
        return np.concatenate([flatten(value) for value in values]) if values else np.zeros(0)
    return values if isinstance(values, np.ndarray) else np.array([float(values)])
