"""verl's trainer, whose steps astuner's loop takes: workers, engines, weight sync and checkpoints are verl's."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from astuner.backbone.verl.cluster import refuse_small_ray
from astuner.backbone.verl.fields import Fields, as_batch
from astuner.backbone.verl.loss import RowLoss, row_loss
from astuner.backbone.verl.worker import TrainingActor
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError

_PARTITION = "train"
_SAMPLE = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask"]
_CREDIT = [
    "rollout_log_probs",
    "advantages",
    "old_log_probs",
    "call_starts",
    "call_ends",
    "row_scale",
    "mini_batch",
    "row",
]


@contextlib.contextmanager
def started_trainer(config: DictConfig, run: AstunerConfig, dtype: torch.dtype) -> Iterator[VerlTrainer]:
    """Start TransferQueue, verl's workers and its engines in the Ray that is there.

    Args:
        config: verl's.
        run: astuner's.
        dtype: what the model computes in.

    Raises:
        BackboneError: Ray has no room, or another run computes on it.
    """
    OmegaConf.resolve(config)
    loss = row_loss(run, dtype)
    _refuse_another_run()
    refuse_small_ray(config)
    tq.init(config.transfer_queue)
    # Not in the block below: at its end that other run's queue would be gone.
    _refuse_another_run(own=True)
    try:
        trainer = VerlTrainer(config, loss)
        # verl prints what it is at.
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.init()
        yield trainer
    finally:
        tq.close()


def _refuse_another_run(*, own: bool = False) -> None:
    """Keep out of the TransferQueue of another run.

    Args:
        own: whether this run has one by now, if no other was faster: TransferQueue joins what it finds.

    Raises:
        BackboneError: the Ray has one of another run.
    """
    with contextlib.suppress(ValueError):
        queue = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        # The id of an actor holds that of the driver which has started it.
        if own and queue._actor_id.job_id.hex() == ray.get_runtime_context().get_job_id():
            return
        raise BackboneError(
            "another run computes on this Ray, and verl's TransferQueue serves one at a time; wait for its end, or "
            "leave trainer_common.ray_address out to have a Ray started for this run"
        )


class VerlTrainer(PPOTrainerSync):
    """Holds verl's workers and engines.

    Tasks, advantages and the order of things come from astuner, so verl's data loader, replay buffer and `fit` are not
    used.
    """

    def __init__(self, config: DictConfig, loss: RowLoss) -> None:
        """Set the trainer up; `init` starts its workers.

        Args:
            config: verl's, resolved.
            loss: what the workers compute.
        """
        super().__init__(config=config)
        self._loss = loss

    def init(self) -> None:
        """Start workers and engines, and hand the engines the weights."""
        super().init()
        self.actor_rollout_wg.set_loss_fn(self._loss)

    def _init_dataloader(self) -> None:
        """Have none: astuner knows which tasks a step takes."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(TrainingActor)

    def _load_checkpoint(self) -> None:
        """Load none: astuner's loop says when, and from where."""
        self.global_steps = 0

    @property
    def workers(self) -> int:
        """Data-parallel workers; verl gives each an equal part of a batch."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return int(max(group._dispatch_info["actor"])) + 1

    @property
    def processes(self) -> int:
        """All training workers, those that share a batch's rows among them."""
        return int(self.actor_rollout_wg.world_size)

    @property
    def servers(self) -> list[Any]:
        """The engines' actors."""
        return [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers]

    def sync_weights(self, step: int) -> None:
        """Hand the engines the weights as policy version `step`."""
        self.checkpoint_manager.update_weights(step)

    def free_engines(self) -> None:
        """Have the engines give back memory for the update; the next sync wakes them."""
        self.checkpoint_manager.sleep_replicas()

    def put(self, keys: list[str], rows: list[Fields]) -> None:
        """Store fields of rows, new ones or more of those that are there."""
        tags = [{"status": "success", "seq_len": len(row["input_ids"])} for row in rows if "input_ids" in row]
        tq.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=as_batch(rows), tags=tags or None)

    def get(self, keys: list[str], fields: list[str]) -> TensorDict:
        """Return fields of rows."""
        return tq.kv_batch_get(keys=keys, partition_id=_PARTITION, select_fields=fields)

    def clear(self, keys: list[str]) -> None:
        """Forget rows."""
        if keys:
            tq.kv_clear(keys=keys, partition_id=_PARTITION)

    def batch(self, keys: list[str], lengths: list[int], fields: list[str], **facts: object) -> KVBatchMeta:
        """Return what verl's workers are given in the place of rows; `facts` are about the whole batch."""
        return KVBatchMeta(
            keys=keys,
            tags=[{"seq_len": length} for length in lengths],
            partition_id=_PARTITION,
            fields=fields,
            extra_info={"temperature": self.config.actor_rollout_ref.rollout.temperature, **facts},
        )

    def own_logprobs(self, keys: list[str], lengths: list[int]) -> list[Tensor]:
        """Return the trained model's logprobs of the responses, [R] float32 a row.

        Every data-parallel worker must get as many rows.
        """
        facts = {"calculate_entropy": False, "compute_loss": False}
        self.actor_rollout_wg.compute_log_prob(self.batch(keys, lengths, _SAMPLE, **facts))
        found = self.get(keys, ["log_probs", "response_mask"])
        return list(response_from_nested(found["log_probs"], found["response_mask"]).float().unbind())

    def reference_logprobs(self, keys: list[str], lengths: list[int]) -> list[Tensor]:
        """Return the same of the starting model, and store it as `ref_log_prob`."""
        self._compute_ref_log_prob(self.batch(keys, lengths, _SAMPLE), {})
        return [row.float() for row in self.get(keys, ["ref_log_prob"])["ref_log_prob"].unbind()]

    def update(self, keys: list[str], lengths: list[int], mini_batch_size: int, rate: float) -> dict[str, Any]:
        """Do the optimiser steps of a training step.

        Args:
            keys: the rows, by worker and then mini-batch.
            lengths: their tokens.
            mini_batch_size: rows of a mini-batch, over all workers.
            rate: the learning rate.

        Returns:
            verl's metrics, lists over mini-batches and micro-batches.
        """
        self.actor_rollout_wg.set_learning_rate(rate)
        batch = self.batch(
            keys,
            lengths,
            _SAMPLE + _CREDIT + (["ref_log_prob"] if self._loss.kl_coef > 0 else []),
            calculate_entropy=True,
            global_batch_size=mini_batch_size,
            mini_batch_size=mini_batch_size,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        metrics: dict[str, Any] = self.actor_rollout_wg.update_actor(batch)["metrics"]
        return metrics

    def save(self, folder: Path, step: int) -> None:
        """Write model, optimiser and random state with verl's checkpoint manager."""
        self.actor_rollout_wg.save_checkpoint(str(folder), None, step, max_ckpt_to_keep=None)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""
        self.actor_rollout_wg.load_checkpoint(str(folder))

    def save_model(self, folder: Path, dtype: str) -> None:
        """Write the model as a Hugging Face folder without tokenizer."""
        self.actor_rollout_wg.save_model(str(folder), dtype)
