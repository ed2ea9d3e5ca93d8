"""The loss that Trinity's trainer computes: the algorithms of every backbone (`policy_loss_fn`).

Trinity's own losses weigh experiences alike. Here one brings the factor of its tokens with it (`row_scale`), made for
the whole mini-batch, so that an episode weighs the same however many timelines it has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.policy_loss_fn import PolicyLossFn

from astuner.backbone.algorithms import CallTable, PolicyBatch, resolve, token_kl, token_weights
from astuner.config.trainer import AlgorithmConfig, KlType


class EpisodeLoss(PolicyLossFn):
    """Computes one experience's share of its mini-batch's loss."""

    def __init__(self, backend: str, algorithm: dict[str, Any], kl_coef: float, kl_type: KlType) -> None:
        """Choose the algorithm.

        Args:
            backend: which trainer of Trinity's asks.
            algorithm: the run's `trainer_common.algorithm`.
            kl_coef: of the KL to the starting model; 0 for none.
            kl_type: its estimator.
        """
        super().__init__(backend=backend)
        rule = resolve(AlgorithmConfig(**algorithm)).rule
        assert rule is not None
        self._rule, self._kl_coef, self._kl_type = rule, kl_coef, kl_type

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        advantages: Tensor,
        ref_logprob: Tensor,
        token_counts: Tensor,
        row_scale: Tensor,
        call_spans: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, and sums over the experience's tokens.

        Args:
            logprob, old_logprob, advantages, ref_logprob: [R] float of the response's tokens.
            token_counts: [R] int64, how often each is trained.
            row_scale: [1] float32.
            call_spans: [C, 2] int64, where each call's completion begins and ends.
        """
        counts = token_counts[None]
        current = logprob.float()[None]
        calls = CallTable(torch.zeros(len(call_spans), dtype=torch.int64), call_spans[:, 0], call_spans[:, 1])
        batch = PolicyBatch(current, old_logprob[None], advantages[None], counts, calls)
        trains = bool(counts.any())
        if not trains:
            return current.sum() * 0.0, {}
        result = self._rule.policy_loss(batch)
        weights = token_weights(counts, row_scale)
        loss = (result.token_losses * weights).sum()
        sums = {"loss/policy": loss}
        if self._kl_coef > 0:
            kl = token_kl(current, ref_logprob[None].float(), self._kl_type)
            sums["loss/kl"] = (batch.only_trained(kl) * weights).sum()
            loss = loss + self._kl_coef * sums["loss/kl"]
        sums["loss/total"] = loss
        sums |= {f"ratio/{name}": getattr(result.metrics, name) for name in result.metrics.__slots__}
        difference = (current.detach() - old_logprob[None]).abs() * counts
        sums["logprob_difference"] = difference.sum()
        return loss, {name: float(value.detach()) for name, value in sums.items()}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return nothing: all arguments are given."""
        return {}
