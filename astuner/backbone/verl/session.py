"""The training session of the verl backbone. Import it once the environment of verl and Ray is set."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from ray.exceptions import RayError

from astuner.algorithms import resolve
from astuner.algorithms.credit_assignment import UpdateResult
from astuner.algorithms.distillation import Distiller, load_distiller
from astuner.backbone.base import RunContext
from astuner.backbone.training.session import TrainingSession
from astuner.backbone.training.sync_certificate import SyncCertificate, probe_prompt
from astuner.backbone.verl.checkpoint import VerlCheckpoints
from astuner.backbone.verl.episode_worker_pool import EpisodeWorkerPool
from astuner.backbone.verl.policy_teacher import PolicyTeacher
from astuner.backbone.verl.rollout_engine import check_engines_alive, check_router_alive
from astuner.backbone.verl.trainer import VerlTrainer, certify_sync
from astuner.backbone.verl.update import VerlUpdate
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, OnEpisode

_STOP_SECONDS = 20.0


class VerlSession(TrainingSession):
    """A model on verl's workers, verl's engines that sample from it, and workers that run episodes.

    Attributes:
        context: inputs of the run.
        trainer: verl's trainer, started.
        worker_pool: the workers that run episodes, started.
        dtype: the dtype that the model computes in.
        total_steps: number of training steps of the run.
    """

    def __init__(
        self,
        context: RunContext,
        trainer: VerlTrainer,
        worker_pool: EpisodeWorkerPool,
        dtype: torch.dtype,
        total_steps: int,
    ) -> None:
        self.context = context
        self.trainer = trainer
        self.worker_pool = worker_pool
        self.dtype = dtype
        self.total_steps = total_steps
        self._config = context.config.astuner
        keep = self._config.trainer_common.max_checkpoints_to_keep
        self._checkpoints = VerlCheckpoints(context.record.folder / "checkpoints", keep)
        self._certificate = SyncCertificate(dtype)
        self._is_synced = False
        self._distiller: Distiller | None = None

    @cached_property
    def _verl_update(self) -> VerlUpdate:
        config, tokenizer = self._config, self.context.run_inputs.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        algorithm = resolve(config.trainer_common.algorithm)
        return VerlUpdate(
            config, algorithm, self.trainer, self.dtype, self.total_steps, pad or 0, distiller=self._distiller
        )

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype that the model computes in."""
        return str(self.dtype).removeprefix("torch.")

    def roll_out(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Run the episodes on the workers. Engines that sleep since a checkpoint are woken by a weight sync."""
        if not self.trainer.engines_awake:
            self.sync(self.worker_pool.policy_version)
        episodes = self.worker_pool.run(request, on_episode, on_attempt)
        check_engines_alive(self.trainer.servers)
        check_router_alive(self.trainer.router)
        return episodes

    def update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Update the weights."""
        self.trainer.free_engines()
        return self._verl_update.step(episodes, step)

    def sync(self, step: int) -> None:
        """Copy the weights to the engines, and check that they arrive.

        Raises:
            BackboneError: the engines do not sample with the trainer's weights.
            ModelError: an engine has died.
        """
        if not self._is_synced:
            inputs = self.context.run_inputs
            # verl's workers have the GPUs, so another model is computed on the launching machine's CPU.
            self._distiller = load_distiller(
                self._config,
                inputs.codec,
                inputs.tasks,
                teacher_path=inputs.teacher_path,
                device=torch.device("cpu"),
                policy=PolicyTeacher(self.trainer),
            )
        check_engines_alive(self.trainer.servers)  # verl would wait forever for an engine that has died
        self.trainer.sync_weights(step)
        self.worker_pool.policy_version = step
        self._is_synced = True
        prompt = probe_prompt(self.context.run_inputs.tokenizer)
        certify_sync(self.trainer, self._certificate, step, prompt, self._config.rollout.temperature or 1.0)

    def save(self, step: int, progress: dict[str, Any]) -> bool:
        """Have verl's workers write the checkpoint of `step`."""

        def save_model(folder: Path) -> None:
            self.save_model(folder, step)

        self._free_engines()
        self._checkpoints.save(step, self.trainer, save_model, progress)
        return True

    def load(self) -> dict[str, Any] | None:
        """Have verl's workers restore the newest checkpoint; return its progress, or None if there is no checkpoint."""
        self._free_engines()
        return self._checkpoints.load(self.trainer)

    def save_model(self, folder: Path, step: int) -> None:
        """Write the model as a Hugging Face folder, with adapters merged."""
        self._free_engines()
        self.trainer.save_model(folder, self.compute_dtype)
        self.context.run_inputs.codec.save(folder)

    def _free_engines(self) -> None:
        """Give the memory of the engines to a checkpoint.

        An engine sleeps only when its requests have ended. Those of an interrupted rollout are aborted first.
        """
        if not self.worker_pool.interrupted:
            self.trainer.free_engines()
        elif self.trainer.engines_awake:
            thread = threading.Thread(target=self._stop_engines, daemon=True)
            thread.start()
            # The run may have little time left for the checkpoint, and an engine that has died never answers.
            thread.join(_STOP_SECONDS)
            if self.trainer.engines_awake:
                logger.warning("the engines do not answer, so they keep their memory while the checkpoint is saved")
                self.trainer.engines_awake = False

    def _stop_engines(self) -> None:
        with contextlib.suppress(RayError):
            self.trainer.checkpoint_manager.abort_replicas(reject_request=True)
            self.trainer.free_engines()
