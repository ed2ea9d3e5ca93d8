"""One training step on verl's workers: from episodes with rewards to moved weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from astuner.backbone.algorithms import Algorithm, token_kl
from astuner.backbone.rows import Row, mini_batches, prompt_length, row_scales
from astuner.backbone.sample_updates import SampleKey
from astuner.backbone.schedule import learning_rate
from astuner.backbone.step_credit import (
    StepCredit,
    UpdateResult,
    refuse_foreign_logprobs,
    shuffle_seed,
    step_credit,
    teaches,
    uses_kl_loss,
)
from astuner.backbone.verl.fields import (
    PADDING_LENGTH,
    Fields,
    credit_fields,
    padding_credit,
    padding_fields,
    sample_fields,
)
from astuner.backbone.verl.layout import arrange
from astuner.backbone.verl.loss import flat, take_seen
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.schema import Episode, Sample


@dataclass
class _Stored:
    """The rows of a step in TransferQueue.

    Attributes:
        samples: of the episodes, in order.
        rows: the same with what is known of their credit.
        old_logprobs: [R] float32 a row: what ratios are taken to.
        prefix: of the keys.
        padding: rows that fill up, behind the others.
        reference: [R] float32 a row: logprobs of the starting model, where they are needed.
    """

    samples: list[Sample]
    rows: list[Row]
    old_logprobs: list[Tensor]
    prefix: str
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


@dataclass
class VerlUpdate:
    """Moves the weights of verl's workers by one batch of episodes.

    Attributes:
        config: the run's.
        algorithm: resolved; it has a rule.
        trainer: started.
        dtype: what the model computes in.
        total_steps: of the run.
        pad_token: fills rows that fill up.
        run_id: begins the keys of its rows, so that they are those of no other run.
    """

    config: AstunerConfig
    algorithm: Algorithm
    trainer: VerlTrainer
    dtype: torch.dtype
    total_steps: int
    pad_token: int
    run_id: str = field(default_factory=lambda: uuid4().hex)

    def step(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Train on episodes that have a reward and samples; groups are the episodes of one task.

        Raises:
            BackboneError: the engines' logprobs do not belong to the trained weights, or the gradient is not finite.
        """
        stored = self._store(episodes, step)
        try:
            self._recompute_old_logprobs(stored)
            kl_sums = self._compare_with_reference(stored, len(episodes))
            credit = step_credit(self.config, self.algorithm, episodes, kl_sums)
            metrics, logprobs = self._move(stored, credit, step)
            return credit.result(metrics, credit.given_to(stored.rows), logprobs)
        finally:
            self.trainer.clear(stored.keys)

    def _store(self, episodes: Sequence[Episode], step: int) -> _Stored:
        numbered = [
            (index, number, sample)
            for index, episode in enumerate(episodes)
            for number, sample in enumerate(episode.samples)
        ]
        stored = _Stored(
            samples=[sample for _, _, sample in numbered],
            rows=[Row.of_sample(sample, index, number) for index, number, sample in numbered],
            old_logprobs=[torch.tensor(s.logprobs[prompt_length(s) :], dtype=torch.float32) for _, _, s in numbered],
            prefix=f"{self.run_id}-step{step}",
        )
        fields = [sample_fields(sample) for sample in stored.samples]
        self.trainer.put([stored.key(place) for place in range(len(fields))], fields)
        self._pad(stored, -len(fields) % self.trainer.workers)
        return stored

    def _pad(self, stored: _Stored, more: int) -> None:
        first = len(stored.rows) + stored.padding
        if more > 0:
            keys = [stored.key(number) for number in range(first, first + more)]
            self.trainer.put(keys, [padding_fields(self.pad_token)] * more)
            stored.padding += more

    def _recompute_old_logprobs(self, stored: _Stored) -> None:
        """Have ratios taken to the trainer's own logprobs, where those of the sampler are too coarse for it.

        As in the local backbone: in bfloat16 the two differ by some hundredths, and clip ranges can be narrower.
        """
        common = self.config.trainer_common
        if self.dtype != torch.float32 and (common.mini_batch_num > 1 or common.algorithm.use_kl_in_reward):
            own = self.trainer.own_logprobs(stored.keys, stored.lengths)
            stored.old_logprobs = own[: len(stored.rows)]

    def _compare_with_reference(self, stored: _Stored, n_episodes: int) -> Tensor | None:
        """Ask for the starting model's logprobs where they are needed; return each episode's KL for its reward."""
        algorithm = self.config.trainer_common.algorithm
        if not (uses_kl_loss(self.config) or algorithm.use_kl_in_reward):
            return None
        reference = stored.reference = self.trainer.reference_logprobs(stored.keys, stored.lengths)
        if not algorithm.use_kl_in_reward:
            return None
        sums = torch.zeros(n_episodes)
        for row, sample, old, ref in zip(stored.rows, stored.samples, stored.old_logprobs, reference, strict=False):
            mask = torch.tensor(sample.loss_mask[prompt_length(sample) :])
            sums[row.episode] += float((token_kl(old, ref, algorithm.kl_penalty) * mask).sum())
        return sums

    def _move(
        self, stored: _Stored, credit: StepCredit, step: int
    ) -> tuple[dict[str, float], dict[SampleKey, tuple[float, ...]]]:
        """Do the optimiser steps; a mini-batch without any gradient has none.

        Returns:
            Metrics, and the logprobs that the updates computed of each sample's trained tokens.
        """
        chosen = [number for number, row in enumerate(stored.rows) if credit.takes(row)]
        rows = credit.given_to(stored.rows)
        if not any(row.has_advantage for row in rows):
            return {}, {}
        credited = dict(zip(chosen, rows, strict=True))
        dealt = mini_batches(rows, self.config.trainer_common.mini_batch_num, shuffle_seed(self.config, step))
        parts = [[chosen[place] for place in part] for part in dealt if teaches(self.config, [rows[p] for p in part])]
        scales = self._scales(credited, parts)
        wanted = [[n for n in part if uses_kl_loss(self.config) or credited[n].has_advantage] for part in parts]
        shares = arrange(wanted, stored.lengths, self.trainer.workers)
        size = len(shares[0][0]) * self.trainer.workers
        self._pad(stored, sum(row is None for share in shares for part in share for row in part) - stored.padding)
        keys, lengths, fields = self._laid_out(stored, credited, scales, shares)
        self.trainer.put(keys, fields)
        metrics = self.trainer.update(keys, lengths, size, self._rate(step))
        samples = [(row.episode, row.sample) for row in stored.rows]
        logprobs = {samples[number]: values for number, values in take_seen(metrics).items()}
        return self._summary(metrics, len(parts), step), logprobs

    def _scales(self, credited: Mapping[int, Row], parts: Sequence[Sequence[int]]) -> dict[int, float]:
        """Return each row's factor, by number: of all of a mini-batch's rows, those without gradient among them."""
        mode, longest = self.algorithm.loss_agg_mode, self.config.data.max_response_length
        found: dict[int, float] = {}
        for part in parts:
            scales = row_scales([credited[number] for number in part], mode, longest)
            found.update(zip(part, scales.tolist(), strict=True))
        return found

    def _laid_out(
        self,
        stored: _Stored,
        credited: Mapping[int, Row],
        scales: Mapping[int, float],
        shares: Sequence[Sequence[Sequence[int | None]]],
    ) -> tuple[list[str], list[int], list[Fields]]:
        """Return keys, lengths and credit of the rows in the order in which verl deals them out."""
        keys, fields, lengths = [], [], []
        fills = iter(range(len(stored.rows), len(stored.rows) + stored.padding))
        places = [(part, row) for share in shares for part, rows in enumerate(share) for row in rows]
        for mini_batch, number in places:
            if number is None:
                keys.append(stored.key(next(fills)))
                lengths.append(PADDING_LENGTH)
                fields.append(padding_credit(mini_batch, reference=uses_kl_loss(self.config)))
                continue
            prompt = prompt_length(stored.samples[number])
            old = stored.old_logprobs[number]
            credit = credit_fields(credited[number], number, prompt, old, scales[number], mini_batch)
            if uses_kl_loss(self.config):
                credit = {**credit, "ref_log_prob": stored.reference[number]}
            keys.append(stored.key(number))
            lengths.append(stored.lengths[number])
            fields.append(credit)
        return keys, lengths, fields

    def _rate(self, step: int) -> float:
        return learning_rate(self.config.trainer_common.optim, self.total_steps, step)

    def _summary(self, metrics: Mapping[str, Any], steps: int, step: int) -> dict[str, float]:
        """Return verl's metrics under astuner's names.

        Raises:
            BackboneError: the logprobs are foreign, or a gradient is not finite.
        """
        total = {name: float(np.sum(flat(values))) for name, values in metrics.items()}
        compared = max(total["compared_tokens"], 1.0)
        difference = total["logprob_difference"] / compared
        refuse_foreign_logprobs(difference, self.dtype, f"step {step}")
        norms = flat(metrics["grad_norm"])
        if not all(map(math.isfinite, norms)):
            raise BackboneError(
                f"step {step}: the gradient's norm is {norms}; lower trainer_common.optim.lr, "
                "or set model.dtype: float32"
            )
        trained = max(total["ratio/trained_tokens"], 1.0)
        means = {name: total[name] / steps for name in ("loss/policy", "loss/kl", "loss/total") if name in total}
        return means | {
            "entropy": total["entropy"] / trained,
            "clip_fraction": (total["ratio/clipped_low"] + total["ratio/clipped_high"]) / trained,
            "kl/rollout": total["rollout_kl"] / compared,
            "kl/update": total["ratio/kl_sum"] / trained,
            "ratio/mean": total["ratio/ratio_sum"] / trained,
            "ratio/max": max(flat(metrics["ratio/ratio_max"])),
            "logprob_difference": difference,
            "grad_norm": sum(norms) / len(norms),
            "lr": self._rate(step),
            "update/optimiser_steps": len(norms),
        }
