"""One training step: from episodes with rewards to moved weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from astuner.backbone.algorithms import (
    Algorithm,
    LossMetrics,
    PolicyBatch,
    ReinforcementRule,
    episode_sums,
    token_kl,
    token_weights,
)
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.micro_batches import MicroBatch
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.trained import SeenLogprobs
from astuner.backbone.rows import Row, mini_batches, row_scales
from astuner.backbone.step_credit import (
    UpdateResult,
    refuse_foreign_logprobs,
    shuffle_seed,
    step_credit,
    teaches,
    uses_kl_loss,
)
from astuner.config.root import AstunerConfig
from astuner.schema import Episode


@dataclass
class _Sums:
    """What a step's micro-batches add up to, kept on the device until the step ends."""

    values: dict[str, Tensor] = field(default_factory=dict)
    loss: LossMetrics | None = None
    seen: SeenLogprobs = field(default_factory=SeenLogprobs)

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.values[name] = self.values[name] + value if name in self.values else value

    def add_loss(self, metrics: LossMetrics) -> None:
        self.loss = metrics if self.loss is None else self.loss + metrics


@dataclass
class PolicyUpdate:
    """Moves a policy's weights by one batch of episodes.

    Attributes:
        config: the run's configuration.
        algorithm: resolved; it has a rule.
        policy, optimiser: what moves.
    """

    config: AstunerConfig
    algorithm: Algorithm
    policy: Policy
    optimiser: Optimiser

    @property
    def _rule(self) -> ReinforcementRule:
        assert self.algorithm.rule is not None
        return self.algorithm.rule

    def step(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Train on episodes that have a reward and samples; groups are the episodes of one task.

        Raises:
            BackboneError: the engine's logprobs do not belong to the policy's weights, or the gradient is not finite.
        """
        rows = [
            Row.of_sample(sample, index, number)
            for index, episode in enumerate(episodes)
            for number, sample in enumerate(episode.samples)
        ]
        several = min(self.config.trainer_common.mini_batch_num, len(episodes)) > 1
        if self._rounds_coarsely and (several or self._uses_kl_in_reward):
            rows = self._with_own_logprobs(rows)
        kl_sums = self._kl_of_episodes(rows, len(episodes)) if self._uses_kl_in_reward else None
        credit = step_credit(self.config, self.algorithm, episodes, kl_sums)
        rows = credit.given_to(rows)
        sums = _Sums()
        moved = self._move(rows, sums, step) if any(row.has_advantage for row in rows) else {}
        return credit.result(moved, rows, sums.seen.by_sample())

    @property
    def _rounds_coarsely(self) -> bool:
        return self.policy.dtype != torch.float32

    @property
    def _uses_kl_in_reward(self) -> bool:
        return self.config.trainer_common.algorithm.use_kl_in_reward

    def _move(self, rows: Sequence[Row], sums: _Sums, step: int) -> dict[str, float]:
        norms: list[float] = []
        parts = mini_batches(rows, self.config.trainer_common.mini_batch_num, shuffle_seed(self.config, step))
        for part in ([rows[place] for place in places] for places in parts):
            if teaches(self.config, part):
                self._accumulate(part, sums, first=not norms, only=len(parts) == 1)
                if not norms:
                    self._refuse_foreign_logprobs(sums, step)
                norms.append(self.optimiser.step(step))
        return self._summary(sums, norms, step)

    @torch.no_grad()
    def _with_own_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows whose old logprobs are the trainer's own in the place of the sampler's.

        In bfloat16 the two differ by some hundredths, as their kernels round differently. The probability ratio, and
        clip ranges as narrow as GSPO's 3e-4, are about how far the weights have moved, so both of its sides have to
        be computed by the same code.
        """
        own = list(rows)
        for batch in self._micro_batches(rows):
            logprobs = self._logprobs(self.policy.model, batch).tolist()
            for values, index in zip(logprobs, batch.rows, strict=True):
                own[index] = replace(rows[index], old_logprobs=values[: len(rows[index].token_ids)])
        return own

    @torch.no_grad()
    def _kl_of_episodes(self, rows: Sequence[Row], n_episodes: int) -> Tensor:
        total = torch.zeros(n_episodes)
        for batch in self._micro_batches(rows):
            reference = self._reference_logprobs(batch)
            kl = token_kl(batch.old_logprobs, reference, self.config.trainer_common.algorithm.kl_penalty)
            total += episode_sums(kl, batch.loss_mask, batch.episodes, n_episodes).cpu()
        return total

    def _accumulate(self, rows: Sequence[Row], sums: _Sums, *, first: bool, only: bool) -> None:
        """Add the gradient of a mini-batch, the `first` or even the `only` one of its step, to the parameters'."""
        scales = row_scales(rows, self.algorithm.loss_agg_mode, self.config.data.max_response_length)
        wanted = list(range(len(rows)))
        if not uses_kl_loss(self.config):
            # A row whose advantage is zero has no gradient; its tokens have their weight in `scales` already.
            wanted = [index for index in wanted if rows[index].has_advantage]
        chosen = [rows[index] for index in wanted]
        chosen_scales = scales[wanted]
        for batch in self._micro_batches(chosen):
            place = list(batch.rows)
            place_scales = chosen_scales[place].to(self.policy.device)
            loss, logprobs = self._loss(batch, place_scales, sums, first=first, only=only)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.seen.add(chosen, batch, logprobs)

    def _loss(
        self, batch: MicroBatch, scales: Tensor, sums: _Sums, *, first: bool, only: bool
    ) -> tuple[Tensor, Tensor]:
        """Return this micro-batch's share of the mini-batch's loss, and [B, T] logprobs without gradient."""
        with self.policy.autocast():
            logprobs, entropy = token_logprobs(
                self.policy.model,
                batch.token_ids,
                batch.loss_mask,
                self.config.rollout.temperature,
                batch.packing,
            )
        weights = token_weights(batch.loss_mask, scales)
        policy_batch = PolicyBatch(
            logprobs=logprobs,
            # Before the first of a step's updates the weights have not moved since sampling: what differs is rounding.
            old_logprobs=logprobs.detach() if only and self._rounds_coarsely else batch.old_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            calls=batch.calls,
        )
        result = self._rule.policy_loss(policy_batch)
        loss = (result.token_losses * weights).sum()
        sums.add("loss/policy", loss)
        sums.add_loss(result.metrics)
        sums.add("entropy", (entropy * batch.loss_mask).sum())
        if first:
            _compare(sums, batch, logprobs.detach())
        if uses_kl_loss(self.config):
            common = self.config.trainer_common
            with torch.no_grad():
                reference = self._reference_logprobs(batch)
            kl = (policy_batch.only_trained(token_kl(logprobs, reference, common.kl_loss_type)) * weights).sum()
            sums.add("loss/kl", kl)
            loss = loss + common.kl_loss_coef * kl
        sums.add("loss/total", loss)
        return loss, logprobs.detach()

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with self.policy.reference() as model:
            return self._logprobs(model, batch)

    def _logprobs(self, model: Any, batch: MicroBatch) -> Tensor:
        with self.policy.autocast():
            logprobs, _ = token_logprobs(
                model, batch.token_ids, batch.loss_mask, self.config.rollout.temperature, batch.packing
            )
        return logprobs

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        return self.policy.micro_batches(rows, self.config.trainer_common.max_tokens_per_micro_batch)

    def _summary(self, sums: _Sums, norms: Sequence[float], step: int) -> dict[str, float]:
        steps = len(norms)
        values = {name: float(value) for name, value in sums.values.items()}
        assert sums.loss is not None
        loss = sums.loss.summary()
        trained = float(sums.loss.trained_tokens)
        compared = max(values["compared_tokens"], 1.0)
        metrics: dict[str, float] = {
            name: values[name] / steps for name in ("loss/policy", "loss/kl", "loss/total") if name in values
        }
        return metrics | {
            "entropy": values["entropy"] / max(trained, 1.0),
            "clip_fraction": loss["clip_fraction_low"] + loss["clip_fraction_high"],
            "kl/rollout": values["rollout_kl"] / compared,
            "kl/update": loss["approx_kl"],
            "ratio/mean": loss["ratio_mean"],
            "ratio/max": loss["ratio_max"],
            "logprob_difference": values["logprob_difference"] / compared,
            "grad_norm": sum(norms) / steps,
            "lr": self.optimiser.lr(step),
            "update/optimiser_steps": steps,
        }

    def _refuse_foreign_logprobs(self, sums: _Sums, step: int) -> None:
        difference = float(sums.values["logprob_difference"]) / max(float(sums.values["compared_tokens"]), 1.0)
        refuse_foreign_logprobs(difference, self.policy.dtype, f"step {step}")


def _compare(sums: _Sums, batch: MicroBatch, logprobs: Tensor) -> None:
    """Add how far the trainer's logprobs are from the sampler's."""
    trained = batch.loss_mask.ne(0)
    counts = batch.loss_mask[trained]
    log_ratio = (logprobs - batch.logprobs)[trained].double()
    sums.add("logprob_difference", (log_ratio.abs() * counts).sum())
    sums.add("rollout_kl", ((log_ratio.expm1() - log_ratio) * counts).sum())
    sums.add("compared_tokens", counts.sum())
