"""The supervised loop (`algorithm: sft`): cross entropy on transcripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from loguru import logger

from astuner.backbone.base import RunContext
from astuner.backbone.ingredients import Ingredients
from astuner.backbone.local.algorithms import (
    Algorithm,
    cross_entropy_losses,
    sample_scales,
    sft_token_mask,
    token_weights,
)
from astuner.backbone.local.checkpoint import Checkpoints
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.progress_state import RunState
from astuner.backbone.local.rows import MicroBatch, Row, micro_batches
from astuner.backbone.task_order import TaskOrder
from astuner.config.root import AstunerConfig
from astuner.errors import TaskDataError
from astuner.schema import Task


@dataclass
class SupervisedLoop:
    """Trains a policy on the transcripts that the training tasks carry.

    Attributes:
        context: the run.
        ingredients: what the user brought.
        policy: the model.
        algorithm: resolved.
        checkpoints: where progress is saved.
        state: counters.
    """

    context: RunContext
    ingredients: Ingredients
    policy: Policy
    algorithm: Algorithm
    checkpoints: Checkpoints
    state: RunState

    @property
    def _config(self) -> AstunerConfig:
        return self.context.config.astuner

    @cached_property
    def _order(self) -> TaskOrder:
        seed = self._config.trainer_common.seed if self._config.data.shuffle else None
        return TaskOrder(self.ingredients.tasks.training, self._config.data.train_batch_size, seed)

    @cached_property
    def _total_steps(self) -> int:
        common = self._config.trainer_common
        return self._order.total_steps(common.total_epochs, common.total_training_steps)

    @cached_property
    def _optimiser(self) -> Optimiser:
        return Optimiser(self.policy.trainable(), self._config.trainer_common.optim, self._total_steps)

    def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        progress = self.checkpoints.load(self.policy, self._optimiser)
        if progress is None:
            return False
        self.state = RunState.load(progress)
        self.context.record.truncate_after(self.state.step)
        logger.info("going on from the checkpoint of step {}", self.state.step)
        return True

    def run(self) -> None:
        """Do the steps that are left.

        Raises:
            TaskDataError: a transcript is too long, or its assistant says nothing.
            KeyboardInterrupt: after the state has been saved.
        """
        common = self._config.trainer_common
        try:
            with self.context.progress.phase("supervised training", self._total_steps, done=self.state.step) as phase:
                while self.state.step < self._total_steps:
                    loss = self._step()
                    phase.advance(f"loss {loss:.3f}")
                    if self.state.step % common.test_freq == 0 or self.state.step == self._total_steps:
                        self._validate()
                    if self.state.step % common.save_freq == 0 and self.state.step < self._total_steps:
                        self.save()
        except KeyboardInterrupt:
            self.save()
            raise

    def save(self) -> None:
        """Write a checkpoint of the steps done."""
        if self.state.step:
            progress = self.state.dump(self.context.started)
            self.checkpoints.save(self.state.step, self.policy, self._optimiser, self.ingredients.tokenizer, progress)

    def _step(self) -> float:
        began = time.time()
        number = self.state.step + 1
        rows = self._rows(self._order.batch(number))
        self.policy.model.train()
        total = 0.0
        scales, batches = self._scaled(rows)
        for batch in batches:
            loss = self._loss(batch, scales)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = self._optimiser.step(number)
        self.state.step = number
        tokens = sum(len(row.token_ids) for row in rows)
        metrics = {
            "loss/sft": total,
            "grad_norm": norm,
            "lr": self._optimiser.lr(number),
            "tokens/raw": tokens,
            "tokens/trained": sum(sum(row.loss_mask) for row in rows),
            "time/step": time.time() - began,
        }
        self.context.record.log_metrics(number, metrics)
        return total

    @torch.no_grad()
    def _validate(self) -> None:
        tasks = self.ingredients.tasks.validation
        if not tasks:
            return
        self.policy.model.eval()
        scales, batches = self._scaled(self._rows(tasks))
        loss = sum(float(self._loss(batch, scales)) for batch in batches)
        self.context.record.log_metrics(self.state.step, {"val/loss": loss})

    def _scaled(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[MicroBatch]]:
        """Return each row's factor [rows] in the loss of the whole batch, and the micro-batches."""
        batches = micro_batches(rows, self._config.trainer_common.max_tokens_per_micro_batch, self.policy.device)
        counts = torch.zeros(len(rows), device=self.policy.device)
        for batch in batches:
            counts[list(batch.rows)] = self._mask(batch).sum(dim=1)
        scales = sample_scales(
            counts,
            torch.arange(len(rows), device=counts.device),
            self.algorithm.loss_agg_mode,
            self._config.data.max_response_length,
        )
        return scales, batches

    def _loss(self, batch: MicroBatch, scales: torch.Tensor) -> torch.Tensor:
        mask = self._mask(batch)
        with self.policy.autocast():
            logprobs, _ = token_logprobs(self.policy.model, batch.token_ids, mask, temperature=1.0)
        losses = cross_entropy_losses(logprobs, mask)
        return (losses * token_weights(mask, scales[list(batch.rows)])).sum()

    def _mask(self, batch: MicroBatch) -> torch.Tensor:
        weight = self._config.trainer_common.algorithm.prompt_loss_weight
        return sft_token_mask(batch.loss_mask, batch.present, weight)

    def _rows(self, tasks: Sequence[Task]) -> list[Row]:
        return [self._row(task) for task in tasks]

    def _row(self, task: Task) -> Row:
        ids, said = self.ingredients.codec.transcript(task.init_messages, task.metadata.get("tools"))
        longest = min(self._config.rollout.max_model_len, self.policy.max_length)
        if len(ids) > longest:
            raise TaskDataError(
                f"transcript {task.task_id!r} has {len(ids)} tokens, more than {longest} "
                "(rollout.max_model_len, or the model's own context); shorten it or raise rollout.max_model_len"
            )
        if not any(said):
            raise TaskDataError(f"transcript {task.task_id!r} has no token that the assistant wrote")
        return Row(ids, tuple(int(one) for one in said))
