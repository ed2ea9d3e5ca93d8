"""The loss that Trinity's trainer computes: the algorithms of every backbone (`policy_loss_fn`).

Trinity's own losses weigh experiences alike. Here one brings the factor of its tokens with it (`row_scale`), made for
the whole mini-batch, so that an episode weighs the same however many timelines it has.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from trinity.algorithm.policy_loss_fn import PolicyLossFn

from astuner.backbone.algorithms import CallTable, PolicyBatch, resolve, token_kl, token_weights
from astuner.config.trainer import AlgorithmConfig, KlType


class EpisodeLoss(PolicyLossFn):
    """Computes a share of a mini-batch's loss: of one experience for Tinker's trainer, of a micro-batch for verl's."""

    def __init__(self, backend: str, algorithm: dict[str, Any], kl_coef: float, kl_type: KlType) -> None:
        """Choose the algorithm.

        Args:
            backend: which trainer of Trinity's asks: tinker or verl.
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
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, and sums over the tokens.

        Args:
            logprob, old_logprob, advantages, ref_logprob: [B, R] float of the responses' tokens, 0 where a response has
                ended; or [R] of one.
            token_counts: [B, R] int64, how often each is trained; or [R].
            row_scale: [B, 1] float32; or [1].
            call_spans: [B, C, 2] int64, where each call's completion begins and ends, (0, 0) for none; or [C, 2].
        """
        counts = _rows(token_counts)
        current, old, credit = (_rows(one).float() for one in (logprob, old_logprob, advantages))
        batch = PolicyBatch(current, old, credit, counts, _calls(call_spans.view(len(counts), -1, 2)))
        result = self._rule.policy_loss(batch)
        weights = token_weights(counts, row_scale.flatten())
        loss = (result.token_losses * weights).sum()
        sums = {"loss/policy": loss}
        if self._kl_coef > 0:
            kl = token_kl(current, _rows(ref_logprob).float(), self._kl_type)
            sums["loss/kl"] = (batch.only_trained(kl) * weights).sum()
            loss = loss + self._kl_coef * sums["loss/kl"]
        sums["loss/total"] = loss
        sums |= {f"ratio/{name}": getattr(result.metrics, name) for name in result.metrics.__slots__}
        sums["logprob_difference"] = ((current.detach() - old).abs() * counts).sum()
        return loss, {name: self._told(float(value.detach())) for name, value in sums.items()}

    def _told(self, value: float) -> Any:
        """Return a sum as the trainer adds it up: verl's takes means over micro-batches of plain numbers."""
        if self.backend != "verl":
            return value
        from verl.utils.metric import AggregationType, Metric

        return Metric(AggregationType.SUM, value)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return nothing: all arguments are given."""
        return {}


def _rows(values: Tensor) -> Tensor:
    """Return [B, R] of [B, R], or of one row's [R]."""
    return values if values.dim() > 1 else values[None]


def _calls(spans: Tensor) -> CallTable:
    """Return the calls of [B, C, 2] spans that are some."""
    rows, places = (spans[..., 1] > spans[..., 0]).nonzero(as_tuple=True)
    starts, ends = spans[rows, places].unbind(-1)
    return CallTable(rows, starts, ends)
