"""The supervised loop (`algorithm: sft`): cross entropy on transcripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from astuner.algorithms.aggregate import cross_entropy_losses, sample_scales, sft_token_weights, token_weights
from astuner.algorithms.registry import resolve
from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.local.backbone import LocalSession
from astuner.backbone.local.forward import MicroBatch, token_logprobs
from astuner.backbone.local.policy import return_free_memory
from astuner.backbone.training.rl_loop import RlLoop
from astuner.errors import TaskDataError, short_repr
from astuner.schema import Task, TokenCounts
from astuner.system.clock import timestamp
from astuner.system.signals import signals_deferred


@dataclass
class SupervisedLoop(RlLoop):
    """Trains on the transcripts of the training tasks.

    The order of steps, validations and checkpoints is that of `RlLoop`; a step and a validation are different.
    """

    session: LocalSession
    _training: dict[str, TrainingRow] = field(default_factory=dict, init=False)
    _validation: list[TrainingRow] = field(default_factory=list, init=False)

    def prepare(self) -> None:
        """Tokenize all transcripts; raise TaskDataError before the first step if one cannot be used."""
        tasks = self.context.run_inputs.tasks
        with self.context.progress.bar("transcripts", len(tasks.training) + len(tasks.validation)):
            for task in tasks.training:
                self._training[task.task_id] = self._row(task)
                self.context.progress.advance()
            for task in tasks.validation:
                self._validation.append(self._row(task))
                self.context.progress.advance()

    def train_step(self, step: int) -> str:
        """Do one optimizer step and return a note for the progress bar."""
        started = timestamp()
        session, state = self.session, self.state
        rows = [self._training[task.task_id] for task in self.order.batch(step)]
        progress = self.context.progress
        title = f"{self._step_name(step)}: update"
        with signals_deferred(), self.context.phase("update"), progress.bar(title, len(rows), unit="transcripts"):
            session.policy.model.train()
            total = 0.0
            scales, batches = self._scaled_micro_batches(rows)
            for batch in batches:
                loss = self._loss(batch, scales)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                return_free_memory()
                progress.advance(len(batch.rows))
            norm = session.optimizer.step(step)
            state.step = step
            self.end_task_step(step, {})
            tokens = sum(len(row.token_ids) for row in rows)
            trained = int(sum(np.sum(row.train_counts) for row in rows))
            state.totals.tokens += TokenCounts(tokens, tokens, trained)
            metrics = {
                "loss/sft": total,
                "grad_norm": norm,
                "lr": session.optimizer.lr(step),
                "update/cpu_threads": torch.get_num_threads(),
                "tokens/raw": tokens,
                "tokens/trained": trained,
                "time/step": timestamp() - started,
            }
            self.context.record.log_metrics(step, metrics)
        session.spare_cores.adapt_threads()
        return f"loss {total:.3f}"

    @torch.no_grad()
    def validate(self, title: str) -> None:
        """Record the loss on the validation transcripts, if there are any."""
        if not self._validation:
            return
        self.session.policy.model.eval()
        rows, progress, loss = self._validation, self.context.progress, 0.0
        with self.context.phase("validation"), progress.bar(title, len(rows), unit="transcripts"):
            scales, batches = self._scaled_micro_batches(rows)
            for batch in batches:
                loss += float(self._loss(batch, scales))
                progress.advance(len(batch.rows))
        with signals_deferred():
            self.context.record.log_metrics(self.state.step, {"val/loss": loss})
            self.state.validated = self.state.step

    def _scaled_micro_batches(self, rows: Sequence[TrainingRow]) -> tuple[torch.Tensor, list[MicroBatch]]:
        """Return each row's factor [rows] in the whole batch's loss, and the micro-batches."""
        common = self.config.trainer_common
        batches = self.session.policy.micro_batches(rows, common.max_tokens_per_micro_batch)
        counts = torch.zeros(len(rows), device=self.session.policy.device)
        for batch in batches:
            counts[list(batch.rows)] = self._mask(batch).sum(dim=1)
        scales = sample_scales(
            counts,
            torch.arange(len(rows), device=counts.device),
            resolve(common.algorithm).loss_agg_mode,
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
        return sft_token_weights(batch.train_counts, batch.present, weight)

    def _row(self, task: Task) -> TrainingRow:
        codec = self.context.run_inputs.codec
        ids, assistant_mask = codec.transcript(task.init_messages, task.metadata.get("tools"))
        longest = min(self.config.rollout.max_model_len, self.session.policy.max_length)
        if len(ids) > longest:
            raise TaskDataError(
                f"transcript {short_repr(task.task_id)} has {len(ids)} tokens, more than {longest} "
                "(rollout.max_model_len, or the model's own context); shorten it or raise rollout.max_model_len"
            )
        if not any(assistant_mask):
            raise TaskDataError(
                f"transcript {short_repr(task.task_id)} has no token of an assistant message to train on; remove it"
            )
        # Arrays: a tuple would take ten times the memory, and all transcripts stay in memory.
        return TrainingRow(np.asarray(ids, np.int32), np.asarray(assistant_mask, np.int32))
