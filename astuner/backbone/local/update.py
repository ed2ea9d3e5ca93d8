"""One training step: from episodes with rewards to moved weights."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    has_signal,
    overlong_punishment,
    rewards_with_kl,
    sample_scales,
    token_kl,
    token_weights,
)
from astuner.backbone.credit import call_advantages
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.rows import MicroBatch, Row
from astuner.config.consistency import GROUP_ALGORITHMS
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.schema import Episode

# Engine and trainer hold the same weights when a step begins, so their logprobs agree but for rounding
# (1e-5 in float32, some hundredths in bfloat16). A larger mean difference means that weights did not arrive.
_MOST_LOGPROB_DIFFERENCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}


@dataclass
class _Sums:
    """What a step's micro-batches add up to, kept on the device until the step ends."""

    values: dict[str, Tensor] = field(default_factory=dict)
    loss: LossMetrics | None = None

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.values[name] = self.values[name] + value if name in self.values else value

    def add_loss(self, metrics: LossMetrics) -> None:
        self.loss = metrics if self.loss is None else self.loss + metrics


@dataclass(frozen=True)
class UpdateResult:
    """What a training step did.

    Attributes:
        metrics: by name.
        advantages: one an episode, in the order given.
        signal: whether any rewards that are compared with each other differed.
    """

    metrics: dict[str, float]
    advantages: tuple[float, ...]
    signal: bool


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
        rows = [Row.of_sample(sample, index) for index, episode in enumerate(episodes) for sample in episode.samples]
        if self._rounds_coarsely and (self._mini_batch_num(rows) > 1 or self._uses_kl_in_reward):
            rows = self._with_own_logprobs(rows)
        rewards, advantages, own, signal = self._advantages(episodes, rows)
        rows = [_with_advantages(row, float(advantages[row.episode]), own[row.episode]) for row in rows]
        if self._rule.dynamic_sampling:
            rows = [row for row in rows if bool(signal[row.episode])]
        metrics = {
            "reward/shaped": float(rewards.mean()),
            "update/groups_without_variance": _groups_without(signal, episodes),
        }
        if any(_has_advantage(row) for row in rows):
            metrics |= self._move(rows, step)
        return UpdateResult(metrics, tuple(advantages.tolist()), bool(signal.any()))

    @property
    def _rounds_coarsely(self) -> bool:
        return self.policy.dtype != torch.float32

    @property
    def _uses_kl_in_reward(self) -> bool:
        return self.config.trainer_common.algorithm.use_kl_in_reward

    def _move(self, rows: Sequence[Row], step: int) -> dict[str, float]:
        sums = _Sums()
        norms: list[float] = []
        parts = _mini_batches(rows, self._mini_batch_num(rows), self._shuffle_seed(step))
        for part in parts:
            if self._teaches(part):
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

    def _teaches(self, rows: Sequence[Row]) -> bool:
        """Whether a mini-batch has any gradient: all its episodes may belong to groups without variance."""
        return self._uses_kl_loss() or any(map(_has_advantage, rows))

    def _mini_batch_num(self, rows: Sequence[Row]) -> int:
        return min(self.config.trainer_common.mini_batch_num, len({row.episode for row in rows}))

    def _shuffle_seed(self, step: int) -> str:
        return f"{self.config.trainer_common.seed}|mini-batches|{step}"

    def _advantages(
        self, episodes: Sequence[Episode], rows: Sequence[Row]
    ) -> tuple[Tensor, Tensor, Sequence[Mapping[str, float]], Tensor]:
        """Return shaped rewards [E], advantages [E], those of calls, and whether an episode's rewards differ [E].

        Rewards count as different before the KL estimate, whose noise makes all of them so, is taken off; where the
        algorithm leaves groups out, before any shaping.
        """
        raw = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32)
        algorithm = self.config.trainer_common.algorithm
        lengths = torch.tensor([_response_length(episode) for episode in episodes])
        rewards = scored = raw + overlong_punishment(
            lengths, self.config.data.max_response_length, algorithm.overlong_buffer_length
        )
        if algorithm.use_kl_in_reward:
            rewards = rewards_with_kl(rewards, self._kl_of_episodes(rows, len(episodes)), algorithm.kl_coef)
        groups = {task_id: index for index, task_id in enumerate(dict.fromkeys(e.task.task_id for e in episodes))}
        group_ids = torch.tensor([groups[episode.task.task_id] for episode in episodes])
        advantages = self._rule.advantages(rewards, group_ids)
        own = call_advantages(self._rule.advantages, episodes, rewards - raw, group_ids)
        compared = raw if self._rule.dynamic_sampling else scored
        peers = group_ids if self.algorithm.name in GROUP_ALGORITHMS else torch.zeros_like(group_ids)
        told_apart = call_advantages(self._rule.advantages, episodes, compared - raw, group_ids)
        differs = torch.tensor([float(any(found.values())) for found in told_apart])
        in_group = torch.zeros_like(differs).index_add(0, peers, differs)[peers] > 0
        signal = has_signal(compared, peers) | in_group
        if self._rule.dynamic_sampling:
            advantages = torch.where(signal, advantages, 0.0)
        return rewards, advantages, own, signal

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
        trained = torch.tensor([sum(row.loss_mask) for row in rows])
        episode_index = torch.tensor([row.episode for row in rows])
        scales = sample_scales(
            trained, episode_index, self.algorithm.loss_agg_mode, self.config.data.max_response_length
        )
        wanted = list(range(len(rows)))
        if not self._uses_kl_loss():
            # A row whose advantage is zero has no gradient; its tokens have their weight in `scales` already.
            wanted = [index for index in wanted if _has_advantage(rows[index])]
        chosen = [rows[index] for index in wanted]
        chosen_scales = scales[wanted]
        for batch in self._micro_batches(chosen):
            place = list(batch.rows)
            place_scales = chosen_scales[place].to(self.policy.device)
            loss = self._loss(batch, place_scales, sums, first=first, only=only)
            loss.backward()  # type: ignore[no-untyped-call]

    def _loss(self, batch: MicroBatch, scales: Tensor, sums: _Sums, *, first: bool, only: bool) -> Tensor:
        """Return this micro-batch's share of the mini-batch's loss."""
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
        if self._uses_kl_loss():
            common = self.config.trainer_common
            with torch.no_grad():
                reference = self._reference_logprobs(batch)
            kl = (policy_batch.only_trained(token_kl(logprobs, reference, common.kl_loss_type)) * weights).sum()
            sums.add("loss/kl", kl)
            loss = loss + common.kl_loss_coef * kl
        sums.add("loss/total", loss)
        return loss

    def _uses_kl_loss(self) -> bool:
        common = self.config.trainer_common
        return common.use_kl_loss and common.kl_loss_coef > 0

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
        most = _MOST_LOGPROB_DIFFERENCE[self.policy.dtype]
        if difference > most:
            raise BackboneError(
                f"step {step}: logprobs of the rollout and of the trainer differ by {difference:.3g} nats a token on "
                f"average (at most {most} can be rounding): the engine did not sample with the trained weights, or "
                "sampled in another precision"
            )


def _with_advantages(row: Row, whole: float, own: Mapping[str, float]) -> Row:
    """Return the row with the advantages of its calls: `own` by call id, for all others that of the episode."""
    return replace(row, advantages=[own.get(call_id, whole) for call_id in row.call_ids])


def _has_advantage(row: Row) -> bool:
    return any(row.advantages)


def _compare(sums: _Sums, batch: MicroBatch, logprobs: Tensor) -> None:
    """Add how far the trainer's logprobs are from the sampler's."""
    trained = batch.loss_mask.ne(0)
    counts = batch.loss_mask[trained]
    log_ratio = (logprobs - batch.logprobs)[trained].double()
    sums.add("logprob_difference", (log_ratio.abs() * counts).sum())
    sums.add("rollout_kl", ((log_ratio.expm1() - log_ratio) * counts).sum())
    sums.add("compared_tokens", counts.sum())


def _mini_batches(rows: Sequence[Row], count: int, seed: str) -> list[list[Row]]:
    """Deal the episodes, shuffled by `seed`, into `count` parts; an episode's rows stay together."""
    episodes = sorted({row.episode for row in rows})
    random.Random(seed).shuffle(episodes)
    part = {episode: index % count for index, episode in enumerate(episodes)}
    batches: list[list[Row]] = [[] for _ in range(count)]
    for row in rows:
        batches[part[row.episode]].append(row)
    return batches


def _response_length(episode: Episode) -> int:
    """Return the tokens that follow a timeline's first prompt, for the longest of the episode's timelines."""
    return max(len(sample.token_ids) - min(span.start for span in sample.spans) for sample in episode.samples)


def _groups_without(signal: Tensor, episodes: Sequence[Episode]) -> float:
    by_task: dict[str, bool] = defaultdict(bool)
    for episode, has in zip(episodes, signal.tolist(), strict=True):
        by_task[episode.task.task_id] |= has
    return sum(not has for has in by_task.values()) / max(len(by_task), 1)
