"""The training session of the verl backbone. Import it once the environment of verl and Ray is set."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from ray.exceptions import RayError

from astuner.algorithms.credit_assignment import UpdateResult
from astuner.algorithms.distillation.distiller import Distiller, load_distiller
from astuner.algorithms.distillation.teachers import TeacherSequence
from astuner.algorithms.registry import resolve
from astuner.backbone.base import RunContext
from astuner.backbone.training.checkpoints import CheckpointFolder, unreadable
from astuner.backbone.training.session import TrainingSession
from astuner.backbone.training.sync_certificate import SyncCertificate, probe_prompt
from astuner.backbone.verl.episode_hosts import EpisodeHosts
from astuner.backbone.verl.rollout_engine import check_engines_alive, check_router_alive
from astuner.backbone.verl.trainer import VerlTrainer, certify_sync
from astuner.backbone.verl.update import VerlUpdate
from astuner.errors import RecordError, first_line
from astuner.schema import Episode
from astuner.task_rollout.rollout import BatchRequest, OnEpisode

_STOP_SECONDS = 20.0
# In a checkpoint: its state, the folder of verl's own checkpoint, that of the model, and the number of processes.
_STATE, _ACTOR, _MODEL, _WORKERS = "progress.json", "actor", "model", "workers"


@dataclass(eq=False)
class VerlSession(TrainingSession):
    """A model on verl's workers, verl's engines that sample from it, and started `hosts` that run episodes."""

    context: RunContext
    trainer: VerlTrainer
    hosts: EpisodeHosts
    dtype: torch.dtype
    total_steps: int
    _is_synced: bool = field(default=False, init=False)
    _distiller: Distiller | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._config = self.context.config.astuner
        keep = self._config.trainer_common.max_checkpoints_to_keep
        self._checkpoints = VerlCheckpoints(self.context.record.folder / "checkpoints", keep)
        self._certificate = SyncCertificate(self.dtype)

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
            self.sync(self.hosts.policy_version)
        episodes = self.hosts.run(request, on_episode, on_attempt)
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
        self.hosts.policy_version = step
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
        if not self.hosts.interrupted:
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


class VerlCheckpoints:
    """The checkpoints of a run.

    Each folder, such as `checkpoints/step_000020/`, holds verl's own checkpoint in `actor/`, the Hugging Face model in
    `model/`, and the run's state in `progress.json`.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """Use `folder`, and keep the newest `keep` checkpoints."""
        self._folder = CheckpointFolder(folder, keep)

    def save(
        self, step: int, trainer: VerlTrainer, save_model: Callable[[Path], None], progress: dict[str, Any]
    ) -> Path:
        """Write a checkpoint and return its folder; RecordError: earlier checkpoints are untouched.

        `progress` has what else a resumed run needs, as JSON values.
        """

        def write_files(folder: Path) -> None:
            try:
                trainer.save(folder / _ACTOR, step)
                save_model(folder / _MODEL)
            except RayError as error:
                raise OSError(first_line(error)) from error
            (folder / _STATE).write_text(json.dumps({**progress, "step": step, _WORKERS: trainer.processes}))

        return self._folder.write(step, write_files)

    def load(self, trainer: VerlTrainer) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its progress, including `step`; return None if there is none.

        Raises:
            RecordError: the checkpoint cannot be read, or was written by a different number of workers.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            progress: dict[str, Any] = json.loads((newest / _STATE).read_text())
            workers = progress.pop(_WORKERS, trainer.processes)
            if workers != trainer.processes:
                raise RecordError(
                    f"the checkpoint {newest} was written by {workers} training workers, each of which wrote a part; "
                    f"this run has {trainer.processes}. Set trainer_common.n_gpus_per_node × nnodes to {workers} to "
                    "resume from it, or trainer_common.resume: false to start from scratch. The checkpoint is intact"
                )
            trainer.load(newest / _ACTOR)
        except (RayError, OSError, ValueError, TypeError, AttributeError) as error:
            raise unreadable(newest, first_line(error)) from error
        self._folder.remove_old()
        return progress


@dataclass(frozen=True)
class PolicyTeacher:
    """Scores tokens with the workers' current weights, at the run's temperature."""

    trainer: VerlTrainer

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Score the spans; see `Teacher.logprobs`."""
        starts = [min(start for start, _ in sequence.spans) for sequence in sequences]
        scored = self.trainer.score(
            "teacher", [(sequence.token_ids, start) for sequence, start in zip(sequences, starts, strict=True)]
        )
        results = []
        for sequence, first, values in zip(sequences, starts, scored, strict=True):
            result = np.zeros(len(sequence.token_ids), np.float32)
            for start, end in sequence.spans:
                result[start:end] = values[start - first : end - first].numpy()
            results.append(result)
        return results

    def close(self) -> None:
        """Do nothing: the trainer is used until the run ends."""
