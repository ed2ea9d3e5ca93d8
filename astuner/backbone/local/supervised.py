"""The supervised loop (`algorithm: sft`): cross entropy on transcripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from astuner.backbone.algorithms import (
    cross_entropy_losses,
    sample_scales,
    sft_token_mask,
    token_weights,
)
from astuner.backbone.interrupt import interrupt_deferred
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.loop import LocalLoop
from astuner.backbone.local.micro_batches import MicroBatch
from astuner.backbone.rows import Row
from astuner.errors import TaskDataError
from astuner.schema import Task, TokenCounts


@dataclass
class SupervisedLoop(LocalLoop):
    """Learns from the transcripts that the training tasks carry.

    Attributes:
        session, algorithm, checkpoints: as in `LocalLoop`.
    """

    _training: dict[str, Row] = field(default_factory=dict, init=False)
    _validation: list[Row] = field(default_factory=list, init=False)

    def step(self) -> str:
        """Do one optimiser step; return a note for the progress bar."""
        with interrupt_deferred(), self.session.context.phase("update"):
            return f"loss {self._learn(time.time()):.3f}"

    def _learn(self, began: float) -> float:
        number = self.state.step + 1
        rows = [self._training[task.task_id] for task in self.order.batch(number)]
        self.session.policy.model.train()
        total = 0.0
        scales, batches = self._scaled(rows)
        for batch in batches:
            loss = self._loss(batch, scales)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = self.optimiser.step(number)
        self.state.step = number
        tokens = sum(len(row.token_ids) for row in rows)
        trained = int(sum(np.sum(row.loss_mask) for row in rows))
        self.state.totals.tokens += TokenCounts(tokens, tokens, trained)
        metrics = {
            "loss/sft": total,
            "grad_norm": norm,
            "lr": self.optimiser.lr(number),
            "tokens/raw": tokens,
            "tokens/trained": trained,
            "time/step": time.time() - began,
        }
        self.session.context.record.log_metrics(number, metrics)
        return total

    def train(self) -> None:
        """Do the steps that are left, and a last validation; a transcript of no use is found before the first one.

        Raises:
            TaskDataError: a transcript is too long, or its assistant says nothing.
        """
        tasks = self.session.ingredients.tasks
        with self.session.context.progress.phase("transcripts", len(tasks.training) + len(tasks.validation)) as phase:
            for task in tasks.training:
                self._training[task.task_id] = self._row(task)
                phase.advance()
            for task in tasks.validation:
                self._validation.append(self._row(task))
                phase.advance()
        super().train()
        if self.state.validated != self.state.step:
            self.validate()

    @torch.no_grad()
    def validate(self) -> None:
        """Record the loss on the validation transcripts, where there are any."""
        if not self._validation:
            return
        self.session.policy.model.eval()
        with self.session.context.phase("validation"):
            scales, batches = self._scaled(self._validation)
            loss = sum(float(self._loss(batch, scales)) for batch in batches)
        with interrupt_deferred():
            self.session.context.record.log_metrics(self.state.step, {"val/loss": loss})
            self.state.validated = self.state.step

    def _scaled(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[MicroBatch]]:
        """Return each row's factor [rows] in the loss of the whole batch, and the micro-batches."""
        batches = self.session.policy.micro_batches(rows, self.config.trainer_common.max_tokens_per_micro_batch)
        counts = torch.zeros(len(rows), device=self.session.policy.device)
        for batch in batches:
            counts[list(batch.rows)] = self._mask(batch).sum(dim=1)
        scales = sample_scales(
            counts,
            torch.arange(len(rows), device=counts.device),
            self.algorithm.loss_agg_mode,
            self.config.data.max_response_length,
        )
        return scales, batches

    def _loss(self, batch: MicroBatch, scales: torch.Tensor) -> torch.Tensor:
        mask = self._mask(batch)
        with self.session.policy.autocast():
            logprobs, _ = token_logprobs(self.session.policy.model, batch.token_ids, mask, 1.0, batch.packing)
        losses = cross_entropy_losses(logprobs, mask)
        return (losses * token_weights(mask, scales[list(batch.rows)])).sum()

    def _mask(self, batch: MicroBatch) -> torch.Tensor:
        weight = self.config.trainer_common.algorithm.prompt_loss_weight
        return sft_token_mask(batch.loss_mask, batch.present, weight)

    def _row(self, task: Task) -> Row:
        ids, said = self.session.ingredients.codec.transcript(task.init_messages, task.metadata.get("tools"))
        longest = min(self.config.rollout.max_model_len, self.session.policy.max_length)
        if len(ids) > longest:
            raise TaskDataError(
                f"transcript {task.task_id!r} has {len(ids)} tokens, more than {longest} "
                "(rollout.max_model_len, or the model's own context); shorten it or raise rollout.max_model_len"
            )
        if not any(said):
            raise TaskDataError(f"transcript {task.task_id!r} has no token that the assistant wrote")
        # Arrays: a tuple would take ten times the memory, and all transcripts are kept.
        return Row(np.asarray(ids, np.int32), np.asarray(said, np.int32))
