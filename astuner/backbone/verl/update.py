"""The policy update of a training step on verl's workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from astuner.algorithms.correction import update_summary
from astuner.algorithms.credit_assignment import (
    StepAdvantages,
    UpdateResult,
    check_logprob_gap,
    has_gradient,
    shuffle_seed,
    step_advantages,
    trains_without_advantage,
    uses_kl_loss,
)
from astuner.algorithms.distillation.distiller import Distiller
from astuner.algorithms.kl import high_entropy_threshold, token_kl
from astuner.algorithms.registry import Algorithm
from astuner.algorithms.training_rows import (
    SampleKey,
    TokenValues,
    TrainingRow,
    mini_batches,
    prompt_length,
    row_scales,
    training_rows,
)
from astuner.backbone.packing.row_bins import UpdateTokens
from astuner.backbone.training.schedule import learning_rate
from astuner.backbone.verl.batch_layout import (
    PADDING_LENGTH,
    RowFields,
    assign_rows,
    loss_fields,
    padding_loss_fields,
    padding_sample_fields,
    response_counts,
    response_logprobs,
    sample_fields,
)
from astuner.backbone.verl.loss import flatten, pop_token_values
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.config.root import AstunerConfig
from astuner.context_tracker.packing import encode_ids
from astuner.schema import Episode, Sample


@dataclass
class _StoredRows:
    """The rows of a step in TransferQueue.

    Attributes:
        old_logprobs: one float32 [R] tensor per row, the denominator of the ratios; empty for the sampler's.
        padding: number of padding rows, which follow the others.
        reference: one float32 [R] tensor per row, logprobs of the reference model; empty if they are not needed.
    """

    samples: list[Sample]
    rows: list[TrainingRow]
    prefix: str
    old_logprobs: list[Tensor] = field(default_factory=list)
    padding: int = 0
    reference: list[Tensor] = field(default_factory=list)

    def key(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    @property
    def keys(self) -> list[str]:
        return [self.key(number) for number in range(len(self.rows) + self.padding)]

    @property
    def lengths(self) -> list[int]:
        return [len(sample.token_ids) for sample in self.samples] + [PADDING_LENGTH] * self.padding

    @property
    def encoded(self) -> list[bytes]:
        """The token ids of each row, as `encode_ids` returns them. They are large, so they are not kept."""
        return [encode_ids(sample.token_ids) for sample in self.samples]

    def denominators(self, number: int) -> Tensor:
        """Return the `old_logprobs` of a row, [R] float32."""
        return self.old_logprobs[number] if self.old_logprobs else response_logprobs(self.samples[number])


@dataclass
class VerlUpdate:
    """Updates the weights in verl's workers, one batch of episodes at a time.

    Attributes:
        algorithm: the resolved algorithm, which has a rule.
        dtype: the dtype that the model computes in.
        run_id: prefix of the row keys, unique to the run.
        distiller: adds a teacher's advantages; None without a teacher.
    """

    config: AstunerConfig
    algorithm: Algorithm
    trainer: VerlTrainer
    dtype: torch.dtype
    total_steps: int
    pad_token: int
    run_id: str = field(default_factory=lambda: uuid4().hex)
    distiller: Distiller | None = None
    _gaps: list[float] = field(default_factory=list, init=False)

    def step(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Train on episodes that have a reward and samples. Episodes of the same task form a group.

        Raises:
            BackboneError: the engines did not sample with the trained weights, or a gradient is not finite.
        """
        stored = self._store(episodes, step)
        with self.trainer.rows_cleared(lambda: stored.keys):
            common = self.config.trainer_common
            in_reward = self.dtype != torch.float32 and common.algorithm.use_kl_in_reward
            if self.trainer.recomputes_old_logprobs or in_reward:
                stored.old_logprobs = self.trainer.policy_outputs("log_probs", stored.keys, stored.lengths)[
                    : len(stored.rows)
                ]
            kl_sums = self._compare_with_reference(stored, len(episodes))
            advantages = step_advantages(self.config, self.algorithm, episodes, kl_sums)
            rows = advantages.assign_to(stored.rows)
            teacher_metrics: dict[str, float] = {}
            if self.distiller is not None:
                rows, teacher_metrics = self.distiller.assign_to(rows, episodes)
            metrics, token_values = self._update_weights(stored, rows, advantages, step)
            return advantages.update_result(teacher_metrics | metrics, rows, token_values)

    def _store(self, episodes: Sequence[Episode], step: int) -> _StoredRows:
        stored = _StoredRows(
            samples=[sample for episode in episodes for sample in episode.samples],
            rows=training_rows(episodes),
            prefix=f"{self.run_id}-step{step}",
        )
        self.trainer.put(stored.keys, map(sample_fields, stored.samples))
        self._add_padding(stored, -len(stored.rows) % self.trainer.workers)
        return stored

    def _add_padding(self, stored: _StoredRows, count: int) -> None:
        first = len(stored.rows) + stored.padding
        if count > 0:
            keys = [stored.key(number) for number in range(first, first + count)]
            self.trainer.put(keys, [padding_sample_fields(self.pad_token)] * count)
            stored.padding += count

    def _compare_with_reference(self, stored: _StoredRows, n_episodes: int) -> Tensor | None:
        """Compute the reference model's logprobs if needed; return each episode's KL [n_episodes] if rewards use it."""
        algorithm = self.config.trainer_common.algorithm
        if not (uses_kl_loss(self.config) or algorithm.use_kl_in_reward):
            return None
        stored.reference = self.trainer.reference_logprobs(stored.keys, stored.lengths)
        if not algorithm.use_kl_in_reward:
            return None
        sums = torch.zeros(n_episodes)
        for number, (row, sample) in enumerate(zip(stored.rows, stored.samples, strict=True)):
            kl = token_kl(stored.denominators(number), stored.reference[number], algorithm.kl_penalty)
            sums[row.episode] += float((kl * response_counts(sample)).sum())
        return sums

    def _update_weights(
        self, stored: _StoredRows, rows: Sequence[TrainingRow], advantages: StepAdvantages, step: int
    ) -> tuple[dict[str, float], dict[SampleKey, TokenValues]]:
        """Train `rows`, to which the algorithm assigned advantages; return metrics and values of trained tokens."""
        trained = [number for number, row in enumerate(stored.rows) if advantages.trains(row)]
        if not any(row.has_advantage for row in rows):
            return {}, {}
        credited = dict(zip(trained, rows, strict=True))
        parts = [
            [trained[index] for index in part]
            for part in mini_batches(
                rows,
                advantages.groups,
                self.config.trainer_common.mini_batch_num,
                shuffle_seed(self.config, step),
                self.config.trainer_common.mini_batch_by,
            )
            if has_gradient(self.config, [rows[index] for index in part])
        ]
        mode, longest = self.algorithm.loss_agg_mode, self.config.data.max_response_length
        scales: dict[int, float] = {}
        for part in parts:
            scales |= zip(part, row_scales([credited[number] for number in part], mode, longest).tolist(), strict=True)
        # Rows without an advantage contribute to the scales, the KL loss and the entropy bonus only.
        with_gradient = [
            [number for number in part if trains_without_advantage(self.config) or credited[number].has_advantage]
            for part in parts
        ]
        tokens = UpdateTokens()
        for part in with_gradient:
            tokens.add_rows([encode_ids(stored.samples[number].token_ids) for number in part])
        rate = learning_rate(self.config.trainer_common.optim, self.total_steps, step)
        metrics: dict[str, Any] = {}
        if self.config.trainer_common.algorithm.selects_by_entropy:
            # The weights after one mini-batch determine the threshold of the next.
            for number, part in enumerate(parts):
                threshold = self._entropy_threshold(stored, part)
                of_part = self._train(stored, credited, scales, [with_gradient[number]], rate, number, threshold)
                for name, values in of_part.items():
                    metrics.setdefault(name, []).append(values)
        else:
            metrics = self._train(stored, credited, scales, with_gradient, rate)
        samples = [(row.episode, row.sample) for row in stored.rows]
        by_row = pop_token_values(metrics)
        trained_logprobs = [(stored.samples[number], values.logprobs) for number, values in by_row.items()]
        self._check_logprob_gap(metrics, trained_logprobs, step)
        token_values = {samples[number]: values for number, values in by_row.items()}
        tokens.computed = int(np.sum(flatten(metrics.pop("computed_tokens"))))
        return self._summarise(metrics, len(parts), advantages, step, rate, tokens.metrics()), token_values

    def _train(
        self,
        stored: _StoredRows,
        credited: Mapping[int, TrainingRow],
        scales: Mapping[int, float],
        parts: Sequence[Sequence[int]],
        rate: float,
        first: int = 0,
        threshold: float | None = None,
    ) -> dict[str, Any]:
        """Do one optimizer step for each of the mini-batches, and return verl's metrics.

        Args:
            credited: the rows with their advantages, by number.
            scales: the loss factor of each row.
            parts: the row numbers of each mini-batch.
            first: index of the first mini-batch in the step.
            threshold: the entropy above which tokens are trained; None trains all tokens.
        """
        encoded = stored.encoded if self.trainer.shares_prefixes else []
        assigned = assign_rows(parts, stored.lengths, self.trainer.workers, encoded)
        del encoded  # it is large
        mini_batch_size = len(assigned[0][0]) * self.trainer.workers
        padding = sum(row is None for worker in assigned for part in worker for row in part)
        self._add_padding(stored, padding - stored.padding)
        padding_rows = iter(range(len(stored.rows), len(stored.rows) + stored.padding))
        # verl splits the rows over its workers in this order.
        order = [
            (mini_batch, next(padding_rows) if row is None else row)
            for worker in assigned
            for mini_batch, rows in enumerate(worker, first)
            for row in rows
        ]
        keys, lengths = [stored.key(number) for _, number in order], stored.lengths
        self.trainer.put(keys, self._loss_fields(stored, credited, scales, order, threshold))
        return self.trainer.update(keys, [lengths[number] for _, number in order], mini_batch_size, rate)

    def _entropy_threshold(self, stored: _StoredRows, part: Sequence[int]) -> float:
        """Return the entropy above which the tokens of a mini-batch are trained, under the current weights."""
        padding = -len(part) % self.trainer.workers
        self._add_padding(stored, padding - stored.padding)
        numbers = [*part, *range(len(stored.rows), len(stored.rows) + padding)]
        lengths = stored.lengths
        entropies = self.trainer.policy_outputs(
            "entropy", [stored.key(number) for number in numbers], [lengths[number] for number in numbers]
        )
        samples = [stored.samples[number] for number in part]
        counts = [response_counts(sample) for sample in samples]
        share = self.config.trainer_common.algorithm.high_entropy_share
        return high_entropy_threshold(torch.cat(entropies[: len(part)]), torch.cat(counts), share)

    def _check_logprob_gap(
        self, metrics: Mapping[str, Any], trained: Sequence[tuple[Sample, Sequence[float]]], step: int
    ) -> None:
        total = {name: float(np.sum(flatten(metrics[name]))) for name in ("logprob_difference", "compared_tokens")}
        difference = total["logprob_difference"] / max(total["compared_tokens"], 1.0)
        pairs = ((sample.trained_logprobs, values) for sample, values in trained)
        check_logprob_gap(difference, self.dtype, f"step {step}", pairs, self._gaps)
        self._gaps.append(difference)

    def _loss_fields(
        self,
        stored: _StoredRows,
        credited: Mapping[int, TrainingRow],
        scales: Mapping[int, float],
        order: Sequence[tuple[int, int]],
        threshold: float | None,
    ) -> Iterator[RowFields]:
        """Yield loss fields, given for each row its mini-batch's index in the step and the row's number."""
        with_reference = uses_kl_loss(self.config)
        bound = {} if threshold is None else {"entropy_threshold": torch.tensor(threshold, dtype=torch.float64)}
        for mini_batch, number in order:
            if number >= len(stored.rows):
                yield {**padding_loss_fields(mini_batch, reference=with_reference), **bound}
                continue
            prompt, old = prompt_length(stored.samples[number]), stored.denominators(number)
            reference = {"ref_log_prob": stored.reference[number]} if with_reference else {}
            fields = loss_fields(credited[number], number, prompt, old, scales[number], mini_batch)
            yield {**fields, **reference, **bound}

    def _summarise(
        self,
        metrics: Mapping[str, Any],
        n_mini_batches: int,
        advantages: StepAdvantages,
        step: int,
        rate: float,
        tokens: Mapping[str, float],
    ) -> dict[str, float]:
        """Convert verl's metrics to astuner's."""
        total = {}
        for name, values in metrics.items():
            numbers = flatten(values)
            total[name] = float(max(numbers) if name.endswith("_max") else np.sum(numbers))
        norms: list[float] = flatten(metrics["grad_norm"]).tolist()
        if not all(map(math.isfinite, norms)):
            raise advantages.gradient_error(step, norms)
        return update_summary(total, norms, rate, n_mini_batches, tokens)
