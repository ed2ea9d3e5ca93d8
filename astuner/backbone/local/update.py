"""One training step: from episodes with rewards to updated weights."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from astuner.algorithms.advantages import episode_sums
from astuner.algorithms.aggregate import token_weights
from astuner.algorithms.correction import Correction, micro_batch_loss, resolve_correction, sampler_gap, update_summary
from astuner.algorithms.credit_assignment import (
    UpdateResult,
    check_logprob_gap,
    has_gradient,
    shuffle_seed,
    step_advantages,
    trains_without_advantage,
    uses_kl_loss,
)
from astuner.algorithms.kl import high_entropy_threshold, token_kl
from astuner.algorithms.policy_batch import PolicyBatch
from astuner.algorithms.registry import Algorithm, ReinforcementRule
from astuner.algorithms.training_rows import (
    SampleKey,
    TokenValues,
    TrainingRow,
    mini_batches,
    row_scales,
    training_rows,
)
from astuner.backbone.local.forward import MicroBatch, token_logprobs
from astuner.backbone.local.policy import GradientNotFinite, Optimizer, Policy, return_free_memory
from astuner.backbone.packing.row_bins import UpdateTokens
from astuner.config.root import AstunerConfig
from astuner.context_tracker.packing import encode_ids
from astuner.schema import Episode, Floats, Packed

if TYPE_CHECKING:
    from astuner.algorithms.distillation.distiller import RowTeacher


@dataclass
class _UpdateValues:
    """The logprobs and entropies that an update computes, for the run record.

    They stay on the device until they are read.
    """

    batches: list[tuple[list[SampleKey], Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, rows: Sequence[TrainingRow], batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> None:
        """Add the values [B, T] of a micro-batch that was split from `rows`."""
        keys = [(rows[index].episode, rows[index].sample) for index in batch.rows]
        self.batches.append((keys, logprobs, entropies, batch.train_counts))

    def by_sample(self) -> dict[SampleKey, TokenValues]:
        """Return the values of each sample's trained tokens, in order."""
        by_key: dict[SampleKey, TokenValues] = {}
        for keys, logprobs, entropies, train_counts in self.batches:
            is_trained = train_counts.ne(0)
            columns = [array("f", values[is_trained].tolist()) for values in (logprobs, entropies)]
            end = 0
            for key, count in zip(keys, is_trained.sum(dim=1).tolist(), strict=True):
                by_key[key] = TokenValues(*(Packed[float]([(column, end, end + count)]) for column in columns))
                end += count
        return by_key


@dataclass
class _Sums:
    """Sums over the micro-batches of a step. They stay on the device until the step ends."""

    values: dict[str, Tensor] = field(default_factory=dict)
    token_values: _UpdateValues = field(default_factory=_UpdateValues)
    tokens: UpdateTokens = field(default_factory=UpdateTokens)

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            new = value.detach().double()
            combine = torch.maximum if name.endswith("_max") else torch.add
            self.values[name] = combine(self.values[name], new) if name in self.values else new


@dataclass
class PolicyUpdate:
    """Updates a policy's weights with batches of episodes.

    Attributes:
        algorithm: the resolved algorithm; it must have a rule.
        on_rows: called with the number of rows that the update has finished since the last call.
        distiller: adds a teacher's advantages; None without a teacher.
    """

    config: AstunerConfig
    algorithm: Algorithm
    policy: Policy
    optimizer: Optimizer
    on_rows: Callable[[int], None] = lambda _: None
    distiller: RowTeacher | None = None
    _gaps: list[float] = field(default_factory=list, init=False)

    @property
    def _rule(self) -> ReinforcementRule:
        assert self.algorithm.rule is not None
        return self.algorithm.rule

    def step(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Train on episodes that have a reward and samples; groups are the episodes of one task.

        BackboneError: the engine did not sample with the policy's weights, or the gradient is not finite.
        ModelError: the teacher cannot score the episodes.
        """
        rows = training_rows(episodes)
        in_reward = self.config.trainer_common.algorithm.use_kl_in_reward
        has_mini_batches = min(self.config.trainer_common.mini_batch_num, len(episodes)) > 1
        needs_old = self._correction.old_from_trainer and has_mini_batches
        if needs_old or (self._is_low_precision and in_reward):
            rows = self._with_trainer_logprobs(rows)
        kl_sums = self._kl_of_episodes(rows, len(episodes)) if in_reward else None
        advantages = step_advantages(self.config, self.algorithm, episodes, kl_sums)
        rows = advantages.assign_to(rows)
        sums = _Sums()
        metrics: dict[str, float] = {}
        if self.distiller is not None:
            rows, metrics = self.distiller.assign_to(rows, episodes)
        if any(row.has_advantage for row in rows):
            try:
                norms: list[float] = []
                before = self.optimizer.sampled_weights()
                common, seed = self.config.trainer_common, shuffle_seed(self.config, step)
                index_lists = mini_batches(rows, advantages.groups, common.mini_batch_num, seed, common.mini_batch_by)
                for part in ([rows[index] for index in indexes] for indexes in index_lists):
                    if has_gradient(self.config, part):
                        self._accumulate(part, sums, first=not norms, only=len(index_lists) == 1)
                        if not norms:
                            self._check_logprob_gap(sums, advantages.episodes, step)
                        norms.append(self.optimizer.step(step))
                    else:
                        self.on_rows(len(part))
                changed = self.optimizer.sampled_weights() != before
                metrics |= self._summary(sums, norms, step) | {"update/changed_weights": float(changed.float().mean())}
            except GradientNotFinite as error:
                raise advantages.gradient_error(step, error.norm) from error
        return advantages.update_result(metrics, rows, sums.token_values.by_sample())

    def trainer_logprobs(self, episodes: Sequence[Episode]) -> dict[SampleKey, Sequence[float]]:
        """Return each sample's logprobs with the current weights; only those of trained tokens are defined."""
        rows = self._with_trainer_logprobs(training_rows(episodes))
        return {(row.episode, row.sample): row.old_logprobs for row in rows}

    @property
    def _is_low_precision(self) -> bool:
        return self.policy.dtype != torch.float32

    @cached_property
    def _correction(self) -> Correction:
        return resolve_correction(self.config, low_precision=self._is_low_precision, can_differ=False)

    @torch.no_grad()
    def _entropy_threshold(self, rows: Sequence[TrainingRow]) -> float:
        algorithm = self.config.trainer_common.algorithm
        if not algorithm.selects_by_entropy:
            return -math.inf
        parts = []
        for batch in self._micro_batches(rows):
            assert batch.temperature is not None  # the rows are those of calls
            with self.policy.autocast():
                _, entropies = token_logprobs(
                    self.policy.model, batch.token_ids, batch.train_counts, batch.temperature, batch.packing
                )
            parts.append((entropies.flatten(), batch.train_counts.flatten()))
        entropies, counts = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return high_entropy_threshold(entropies, counts, algorithm.high_entropy_share)

    @torch.no_grad()
    def _with_trainer_logprobs(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Return the rows with old logprobs that the trainer computes, instead of the sampler's.

        In bfloat16 the two differ by some hundredths, because their kernels round differently. The probability ratio
        measures how far the weights have moved, with clip ranges as narrow as GSPO's 3e-4. The same code must
        therefore compute both of its sides.
        """
        result = list(rows)
        for batch in self._micro_batches(rows):
            logprobs = self._logprobs(self.policy.model, batch).tolist()
            for values, index in zip(logprobs, batch.rows, strict=True):
                result[index] = replace(rows[index], old_logprobs=values[: len(rows[index].token_ids)])
        return result

    @torch.no_grad()
    def _kl_of_episodes(self, rows: Sequence[TrainingRow], n_episodes: int) -> Tensor:
        total = torch.zeros(n_episodes)
        for batch in self._micro_batches(rows):
            reference = self._reference_logprobs(batch)
            kl = token_kl(batch.old_logprobs, reference, self.config.trainer_common.algorithm.kl_penalty)
            total += episode_sums(kl, batch.train_counts, batch.episodes, n_episodes).cpu()
        return total

    def _accumulate(self, rows: Sequence[TrainingRow], sums: _Sums, *, first: bool, only: bool) -> None:
        """Add a mini-batch's gradient: the `first` of its step, or the `only` one."""
        scales = row_scales(rows, self.algorithm.loss_agg_mode, self.config.data.max_response_length)
        indexes = list(range(len(rows)))
        threshold = self._entropy_threshold(rows)
        if not trains_without_advantage(self.config):
            # A row whose advantage is zero has no gradient. `scales` already accounts for its tokens.
            indexes = [index for index in indexes if rows[index].has_advantage]
            self.on_rows(len(rows) - len(indexes))
        rows, scales = [rows[index] for index in indexes], scales[indexes]
        sums.tokens.add_rows([encode_ids(row.token_ids) for row in rows])
        for batch in self._micro_batches(rows):
            sums.tokens.computed += batch.computed_tokens
            batch_scales = scales[list(batch.rows)].to(self.policy.device)
            loss, logprobs, entropies = self._loss(
                batch, batch_scales, sums, first=first, only=only, threshold=threshold
            )
            loss.backward()  # type: ignore[no-untyped-call]
            sums.token_values.add(rows, batch, logprobs, entropies)
            del loss, logprobs, entropies
            self.on_rows(len(batch.rows))
            return_free_memory()

    def _loss(
        self, batch: MicroBatch, scales: Tensor, sums: _Sums, *, first: bool, only: bool, threshold: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a micro-batch's contribution to its mini-batch's loss, its logprobs and its entropies.

        Args:
            scales: [B], the loss factors of its rows.
            first: whether the mini-batch is the first of the step.
            only: whether the mini-batch is the only one of the step.
            threshold: the entropy above which a token's policy loss counts.

        Returns:
            The loss, and the logprobs [B, T] and entropies [B, T] without gradient.
        """
        assert batch.temperature is not None  # the rows are those of calls
        entropy_coef = self.config.trainer_common.algorithm.entropy_coef
        with self.policy.autocast():
            logprobs, entropy = token_logprobs(
                self.policy.model,
                batch.token_ids,
                batch.train_counts,
                batch.temperature,
                batch.packing,
                entropy_gradient=entropy_coef > 0,
            )
        old_logprobs = batch.logprobs
        if self._correction.old_from_trainer:
            # Before the first update of a step, π_old is π.
            old_logprobs = logprobs.detach() if only else batch.old_logprobs
        policy_batch = PolicyBatch(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=batch.advantages,
            train_counts=batch.train_counts,
            calls=batch.calls,
            sampler_logprobs=batch.sampler_logprobs,
        )
        common, kl = self.config.trainer_common, None
        if uses_kl_loss(self.config):
            with torch.no_grad():
                reference = self._reference_logprobs(batch)
            kl = token_kl(logprobs, reference, common.kl_loss_type)
        loss, values = micro_batch_loss(
            self._rule,
            self._correction,
            policy_batch,
            token_weights(batch.train_counts, scales),
            selected=entropy.detach() > threshold,
            kl=kl,
            kl_coef=common.kl_loss_coef,
            entropy=entropy if entropy_coef > 0 else None,
            entropy_coef=entropy_coef,
        )
        sums.add(values | {"entropy": (entropy * batch.train_counts).sum()})
        if first:
            sums.add(sampler_gap(logprobs, batch.logprobs, batch.train_counts))
        return loss, logprobs.detach(), entropy.detach()

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with self.policy.reference() as model:
            return self._logprobs(model, batch)

    def _logprobs(self, model: Any, batch: MicroBatch) -> Tensor:
        with self.policy.autocast():
            assert batch.temperature is not None  # the rows are those of calls
            logprobs, _ = token_logprobs(model, batch.token_ids, batch.train_counts, batch.temperature, batch.packing)
        return logprobs

    def _micro_batches(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        return self.policy.micro_batches(rows, self.config.trainer_common.max_tokens_per_micro_batch)

    def _summary(self, sums: _Sums, norms: Sequence[float], step: int) -> dict[str, float]:
        values = {name: float(value) for name, value in sums.values.items()}
        summary = update_summary(values, norms, self.optimizer.lr(step), len(norms), sums.tokens.metrics())
        return summary | {"update/cpu_threads": torch.get_num_threads()}

    def _check_logprob_gap(self, sums: _Sums, episodes: Sequence[Episode], step: int) -> None:
        difference = float(sums.values["logprob_difference"]) / max(float(sums.values["compared_tokens"]), 1.0)

        def pairs() -> Iterator[tuple[Floats, Sequence[float]]]:
            for (episode, sample), values in sums.token_values.by_sample().items():
                yield episodes[episode].samples[sample].trained_logprobs, values.logprobs

        check_logprob_gap(difference, self.policy.dtype, f"step {step}", pairs(), self._gaps)
        self._gaps.append(difference)
