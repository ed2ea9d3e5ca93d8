"""The loss that verl's training workers compute: the algorithms of every backbone, over verl's batches.

verl's own losses weigh rows alike. Here a row brings the factor of its tokens with it (`row_scale`), made for the
whole mini-batch: an episode weighs the same however many rows it split into, and rows that only fill up nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from astuner.backbone.algorithms import CallTable, PolicyBatch, resolve, token_kl, token_weights
from astuner.backbone.step_credit import uses_kl_loss
from astuner.config.root import AstunerConfig
from astuner.config.trainer import AlgorithmConfig, KlType


@dataclass(frozen=True)
class RowLoss:
    """Computes a micro-batch's share of its mini-batch's loss, as verl's engines call it.

    Attributes:
        algorithm: the run's.
        kl_coef: of the KL to the starting model; 0 for none.
        kl_type: its estimator.
        own_ratio: take ratios to the logprobs as they are now, not to `old_log_probs`: before the first update of a
            step the weights have not moved since sampling, and in bfloat16 what differs is rounding.
    """

    algorithm: AlgorithmConfig
    kl_coef: float
    kl_type: KlType
    own_ratio: bool

    def __call__(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: object = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, and by name sums over the micro-batch and, as arrays, what its forward pass saw."""
        logprobs = no_padding_2_padding(model_output["log_probs"], data).float()
        entropy = no_padding_2_padding(model_output["entropy"], data)
        mask = _padded(data["loss_mask"])
        batch = PolicyBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if self.own_ratio else _padded(data["old_log_probs"]),
            advantages=_padded(data["advantages"]),
            loss_mask=mask,
            calls=_calls(data),
        )
        rule = resolve(self.algorithm).rule
        assert rule is not None
        result = rule.policy_loss(batch)
        weights = token_weights(mask, data["row_scale"])
        loss = (result.token_losses * weights).sum()
        sums = {"loss/policy": loss, "entropy": (entropy * mask).sum()}
        if self.kl_coef > 0:
            kl = token_kl(logprobs, _padded(data["ref_log_prob"]), self.kl_type)
            sums["loss/kl"] = (batch.only_trained(kl) * weights).sum()
            loss = loss + self.kl_coef * sums["loss/kl"]
        sums["loss/total"] = loss
        sums |= {f"ratio/{name}": getattr(result.metrics, name) for name in result.metrics.__slots__}
        sums |= _compared(logprobs.detach(), mask, data)
        # FSDP averages gradients over its workers; this loss is a sum over all of them.
        told = {name: float(value.detach()) for name, value in sums.items()}
        return loss * data["dp_size"], told | seen(logprobs.detach(), mask, data["row"])


def row_loss(run: AstunerConfig, dtype: torch.dtype) -> RowLoss:
    """Return the loss of a run whose model computes in `dtype`."""
    common = run.trainer_common
    return RowLoss(
        algorithm=common.algorithm,
        kl_coef=common.kl_loss_coef if uses_kl_loss(run) else 0.0,
        kl_type=common.kl_loss_type,
        own_ratio=dtype != torch.float32 and common.mini_batch_num == 1,
    )


def _padded(values: Tensor) -> Tensor:
    """[B, R] of nested rows, padded with 0 on the right."""
    return torch.nested.to_padded_tensor(values, 0) if values.is_nested else values


def _calls(data: TensorDict) -> CallTable:
    """Where the completions lie in the responses; an entry of no length fills up."""
    starts, ends = data["call_starts"], data["call_ends"]
    sizes = torch.tensor([len(row) for row in starts.unbind()], device=starts.device)
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=starts.device), sizes)
    flat_starts, flat_ends = torch.cat(list(starts.unbind())), torch.cat(list(ends.unbind()))
    real = flat_ends > flat_starts
    return CallTable(rows[real], flat_starts[real], flat_ends[real])


def _compared(logprobs: Tensor, mask: Tensor, data: TensorDict) -> dict[str, Tensor]:
    """Return how far the trainer's logprobs are from the sampler's, in the first mini-batch of a step.

    In later ones the weights have moved.
    """
    first = (data["mini_batch"] == 0)[:, None]
    trained = mask.ne(0) & first
    counts = mask[trained]
    log_ratio = (logprobs - _padded(data["rollout_log_probs"]))[trained].double()
    return {
        "logprob_difference": (log_ratio.abs() * counts).sum(),
        "rollout_kl": ((log_ratio.expm1() - log_ratio) * counts).sum(),
        "compared_tokens": counts.sum(),
    }


def seen(logprobs: Tensor, mask: Tensor, numbers: Tensor) -> dict[str, np.ndarray]:
    """Return the trained tokens' logprobs as metrics, which verl brings to the driver in lists, in one order for all.

    Args:
        logprobs: [B, R] float32.
        mask: [B, R].
        numbers: [B] int64, of the rows in their step.
    """
    trained = mask.ne(0)
    return {
        "seen/rows": numbers.cpu().numpy(),
        "seen/counts": trained.sum(dim=1).cpu().numpy(),
        "seen/logprobs": logprobs[trained].cpu().numpy(),
    }


def take_seen(metrics: dict[str, Any]) -> dict[int, tuple[float, ...]]:
    """Take what `seen` put into a step's metrics out of them; return the logprobs by the rows' numbers."""
    rows, counts, logprobs = (flat(metrics.pop(f"seen/{name}")) for name in ("rows", "counts", "logprobs"))
    ends = np.cumsum(counts, dtype=int).tolist()
    starts = [0, *ends][: len(ends)]
    return {int(row): tuple(logprobs[a:b]) for row, a, b in zip(rows, starts, ends, strict=True) if row >= 0}


def flat(values: Any) -> list[float]:
    """Return the numbers of verl's metrics: lists, nested by mini-batch, worker and micro-batch, and arrays."""
    if isinstance(values, np.ndarray):
        return [float(value) for value in values]
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [float(values)]
