"""Corrections of the difference between the policy that samples and the policy that is trained.

Three policies take part: μ, which sampled (with the engine's kernels and dtype, possibly with older weights); π_old,
the trainer's policy before the update; and π, the policy in training. The ratio of a loss is π / π_old. A correction
multiplies the loss of each token by a factor that depends on r = π_old / μ, without a gradient
(`astuner.config.corrections` lists the corrections with their sources). With old logprobs of the sampler, π_old is μ in
the ratio, and r is π / μ.

A sequence is the completion of one LLM call, as in GSPO's loss, so a factor does not depend on how an episode is split
into rows. Tokens that are left out still count in the loss normalisation, with a loss of 0.

`micro_batch_loss` is the loss of all trainers, with the correction, the KL term and the entropy bonus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from astuner.algorithms.kl import LOG_RATIO_LIMIT
from astuner.algorithms.policy_batch import CallTokens, PolicyBatch, PolicyLoss
from astuner.algorithms.registry import ReinforcementRule
from astuner.config.corrections import CORRECTIONS, CorrectionConfig, CorrectionSpec
from astuner.config.root import AstunerConfig


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of a run.

    Attributes:
        config: the correction, whose mode is not auto.
        old_from_trainer: whether the trainer computes π_old; otherwise, the ratios use the sampler's logprobs.
    """

    config: CorrectionConfig
    old_from_trainer: bool

    @property
    def _spec(self) -> CorrectionSpec:
        return CORRECTIONS[self.config.mode]

    def factors(self, batch: PolicyBatch) -> tuple[Tensor, CorrectionMetrics]:
        """Return the factors for a micro-batch's token losses.

        Args:
            batch: B rows of T tokens, with `sampler_logprobs`, and with `calls` if the unit is a call.

        Returns:
            [B, T] without gradient, in the dtype of the logprobs; 1 where nothing is corrected.

        Raises:
            BackboneError: `batch.calls` does not match `batch.train_counts`.
        """
        assert batch.sampler_logprobs is not None
        numerator = batch.old_logprobs if self.old_from_trainer else batch.logprobs
        log_ratio = batch.only_trained(numerator.detach() - batch.sampler_logprobs)
        spec = self._spec
        calls = batch.call_tokens() if spec.weights == "sequence" or spec.rejects is not None else None
        # Weights and what is kept have an entry for each call, or for each token.
        if spec.weights == "sequence":
            assert calls is not None
            ratios, counts = _exp(calls.sums(log_ratio)), calls.lengths
        else:
            ratios, counts = _exp(log_ratio), batch.train_counts
        low, high = self.config.weight_range
        weights = torch.ones_like(ratios)
        if spec.masks:
            weights = torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)
        elif spec.weights is not None:
            weights = ratios.clamp(max=high)
        kept = torch.ones_like(ratios)
        if spec.rejects is not None:
            assert calls is not None
            kept = self._kept_calls(batch, calls, log_ratio)
            if spec.weights != "sequence":
                kept = calls.to_tokens(kept, batch.train_counts)
            if spec.rejects == "off_policy":
                # With a teacher, the tokens of a call have different advantages.
                kept = torch.where(batch.token_advantages() >= 0, 1.0, kept)
        is_truncated = ratios > high
        truncated = is_truncated if spec.weights and not spec.masks else torch.zeros_like(is_truncated)
        metrics = CorrectionMetrics.of(batch, log_ratio, ratios, counts, truncated, 1 - kept * weights.ne(0))
        if spec.weights != "sequence":
            return weights * kept, metrics
        assert calls is not None
        return calls.to_tokens(weights * kept, batch.train_counts), metrics

    def metrics_by_staleness(self, batch: PolicyBatch, staleness: Tensor, ages: int) -> list[CorrectionMetrics]:
        """Return the tokens' correction metrics for each staleness.

        Args:
            batch: B rows of T tokens, with `sampler_logprobs` and `calls`.
            staleness: [C] int64, how many training steps older than the trained weights those are that sampled a call.
            ages: the number of results.

        Returns:
            Metrics for calls with staleness 0, 1, …; the last entry includes all larger values.
        """
        assert batch.calls is not None
        binned = staleness.clamp(max=ages - 1)
        metrics = []
        for age in range(ages):
            calls = batch.calls.select(binned == age)
            counts = CallTokens.of(calls, batch.train_counts.shape[1]).counts(batch.train_counts)
            metrics.append(self.factors(replace(batch, calls=calls, train_counts=counts))[1])
        return metrics

    def _kept_calls(self, batch: PolicyBatch, calls: CallTokens, log_ratio: Tensor) -> Tensor:
        """Return 1 for each call whose statistic is within the bounds and 0 for each other one, [C]."""
        low, high = self.config.rejection_range
        limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if self._spec.rejects == "geometric":
            # As in verl, the bounds are those of μ / π_old.
            statistic = calls.means(-limited)
            kept = (statistic >= math.log(low)) & (statistic <= math.log(high))
        elif self._spec.rejects == "k3":
            kept = calls.means(limited.expm1() - limited) <= high
        else:
            assert batch.sampler_logprobs is not None
            kept = calls.means(batch.only_trained(batch.sampler_logprobs - batch.logprobs.detach())) <= high
        return kept.to(log_ratio.dtype)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class CorrectionMetrics:
    """Sums over trained tokens, weighted by their train counts: scalar float64 tensors without gradient.

    The importance ratios are per token, or per call if the weights are. They are measured before truncation and
    masking, so they do not depend on the bounds of the correction.

    Attributes:
        tokens: the number of trained tokens.
        gap_sum, gap_max: sum and maximum of |log r|.
        truncated: the number of tokens whose weight is truncated.
        masked: the number of tokens whose factor is 0.
    """

    tokens: Tensor
    gap_sum: Tensor
    gap_max: Tensor
    ratio_sum: Tensor
    ratio_squares: Tensor
    truncated: Tensor
    masked: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, batch: PolicyBatch, log_ratio: Tensor, ratios: Tensor, counts: Tensor, truncated: Tensor, masked: Tensor
    ) -> CorrectionMetrics:
        """Return the metrics of one micro-batch.

        Args:
            batch, log_ratio: the micro-batch, and log r, [B, T] float.
            ratios, counts, truncated, masked: of one shape, with an entry per token or per call; the count is the
                number of trained tokens in the entry.
        """
        number = counts.double()
        gap = log_ratio.abs().double()
        return cls(
            tokens=number.sum(),
            gap_sum=(gap * batch.train_counts).sum(),
            gap_max=gap.amax() if gap.numel() else gap.sum(),
            ratio_sum=(ratios.double() * number).sum(),
            ratio_squares=(ratios.double().square() * number).sum(),
            truncated=(truncated * number).sum(),
            masked=(masked * number).sum(),
        )


CORRECTION_SUMS = tuple(field.name for field in fields(CorrectionMetrics))
"""The names of the sums in `CorrectionMetrics`."""


def correction_summary(sums: Mapping[str, float], suffix: str = "") -> dict[str, float]:
    """Return the metrics of a step, by name.

    Args:
        sums: the sums of `CorrectionMetrics`, by name.
        suffix: the end of each name.

    Returns:
        The mean and the largest gap in nats, the effective sample size divided by the number of tokens, and the
        truncated and the masked share.
    """
    tokens = max(sums["tokens"], 1.0)
    squares = sums["ratio_squares"]
    summary = {
        "gap_mean": sums["gap_sum"] / tokens,
        "gap_max": sums["gap_max"],
        "effective_sample_size": sums["ratio_sum"] ** 2 / (tokens * squares) if squares else 1.0,
        "truncated": sums["truncated"] / tokens,
        "masked": sums["masked"] / tokens,
    }
    return {f"correction/{name}{suffix}": value for name, value in summary.items()}


def corrected_loss(
    rule: ReinforcementRule, correction: Correction, batch: PolicyBatch
) -> tuple[PolicyLoss, CorrectionMetrics]:
    """Return a micro-batch's token losses, multiplied by the correction factors, and the correction metrics."""
    loss = rule.policy_loss(batch)
    factors, metrics = correction.factors(batch)
    return replace(loss, token_losses=loss.token_losses * factors), metrics


def micro_batch_loss(
    rule: ReinforcementRule,
    correction: Correction,
    batch: PolicyBatch,
    weights: Tensor,
    *,
    selected: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's contribution to its mini-batch's loss, and sums over its tokens, by metric name.

    Args:
        weights: [B, T] float, see `token_weights`.
        selected: [B, T] bool, the tokens whose policy loss counts; None for all.
        kl: [B, T] float, the KL estimate at each token; None without a KL term.
        entropy: [B, T] float, the entropy at each token; None without a bonus.

    Returns:
        The loss, and sums without gradient: `loss/policy`, `loss/kl` with a KL term, `loss/total`, `LossMetrics` as
        `ratio/...`, and `CorrectionMetrics` as `correction/...`. A name that ends with `_max` is a maximum.
    """
    result, corrected = corrected_loss(rule, correction, batch)
    losses = result.token_losses if selected is None else result.token_losses * selected
    loss = (losses * weights).sum()
    sums = {"loss/policy": loss}
    if kl is not None:
        sums["loss/kl"] = (batch.only_trained(kl) * weights).sum()
        loss = loss + kl_coef * sums["loss/kl"]
    if entropy is not None:
        loss = loss - entropy_coef * (batch.only_trained(entropy) * weights).sum()
    sums["loss/total"] = loss
    sums |= {f"ratio/{name}": getattr(result.metrics, name) for name in result.metrics.__slots__}
    sums |= {f"correction/{name}": getattr(corrected, name) for name in CORRECTION_SUMS}
    return loss, {name: value.detach() for name, value in sums.items()}


def sampler_gap(logprobs: Tensor, sampled: Tensor, train_counts: Tensor) -> dict[str, Tensor]:
    """Return sums of the difference between the trainer's and the sampler's logprobs, both [B, T], by metric name."""
    trained = train_counts.ne(0)
    counts = train_counts[trained]
    log_ratio = (logprobs.detach() - sampled)[trained].double()
    return {
        "logprob_difference": (log_ratio.abs() * counts).sum(),
        "rollout_kl": ((log_ratio.expm1() - log_ratio) * counts).sum(),
        "compared_tokens": counts.sum(),
    }


def update_summary(
    totals: Mapping[str, float], norms: Sequence[float], rate: float, mini_batches: int, tokens: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a step's update.

    Args:
        totals: over all mini-batches, what `micro_batch_loss` returns, the `entropy` of the trained tokens, and, over
            the first mini-batch, what `sampler_gap` returns.
        norms: the gradient's norm in each optimizer step, all with the learning rate `rate`.
        tokens: the metrics of the computed tokens.
    """
    trained, compared = max(totals["ratio/trained_tokens"], 1.0), max(totals["compared_tokens"], 1.0)
    losses = ("loss/policy", "loss/kl", "loss/total")
    metrics = {name: totals[name] / mini_batches for name in losses if name in totals}
    metrics |= correction_summary({name: totals[f"correction/{name}"] for name in CORRECTION_SUMS})
    metrics |= tokens
    if len(norms) > 1:  # the loss of the first mini-batch is computed with the weights before the step
        metrics["kl/update"] = totals["ratio/kl_sum"] / trained
    return metrics | {
        "entropy": totals["entropy"] / trained,
        "clip_fraction": totals["ratio/clipped_low"] / trained + totals["ratio/clipped_high"] / trained,
        "kl/rollout": totals["rollout_kl"] / compared,
        "ratio/mean": totals["ratio/ratio_sum"] / trained,
        "ratio/max": totals["ratio/ratio_max"],
        "logprob_difference": totals["logprob_difference"] / compared,
        "grad_norm": sum(norms) / len(norms),
        "lr": rate,
        "update/optimiser_steps": len(norms),
    }


def resolve_correction(config: AstunerConfig, *, low_precision: bool, can_differ: bool) -> Correction:
    """Return the correction of a run.

    Args:
        config: the run's configuration.
        low_precision: whether the model computes in another dtype than float32.
        can_differ: whether the sampler can differ from the trainer because it is another engine or has older weights.

    Returns:
        `auto` is `token_tis` where the two can differ, also by top-p or top-k. Its weight of a token has less variance
        than the product over an answer, which in long answers is soon 0 or truncated. If the ratio of the loss is to
        the sampler, it is the correction, and `auto` is `none`. On trinity, a step with several mini-batches cannot
        have old logprobs of the trainer.
    """
    section = config.trainer_common.correction
    has_no_recomputation = config.backbone == "trinity" and config.trainer_common.mini_batch_num > 1
    has_ratio = config.trainer_common.algorithm.has_ratio
    ratio_corrects = has_ratio and (has_no_recomputation or section.old_logprobs == "sampler")
    # Engines of trinity do not return the logprobs after the cut, so that the correction could not see it.
    can_differ |= config.rollout.is_cut and config.backbone != "trinity"
    if section.mode == "auto":
        corrects = (low_precision or can_differ) and not ratio_corrects
        section = CorrectionConfig(mode="token_tis" if corrects else "none", old_logprobs=section.old_logprobs)
    if section.old_logprobs != "auto":
        return Correction(section, section.old_logprobs == "trainer")
    rounds = low_precision and config.backbone != "trinity"
    return Correction(section, not has_no_recomputation and (section.mode != "none" or rounds))
