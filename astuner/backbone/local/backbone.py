"""The local backbone and its training session: policy, optimizer and engine in one process, on a CPU or one GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from astuner.algorithms.credit_assignment import UpdateResult
from astuner.algorithms.registry import resolve
from astuner.backbone.base import MemoryEstimate, PreflightContext, RunContext, StartedRay
from astuner.backbone.episode_workers.rollout import make_rollout
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.policy import Optimizer, Policy, return_free_memory
from astuner.backbone.local.update import PolicyUpdate
from astuner.backbone.training.checkpoints import CheckpointFolder, save_synced, unreadable
from astuner.backbone.training.rl_loop import SessionBackbone
from astuner.backbone.training.run_inputs import RunInputs
from astuner.backbone.training.schedule import TaskOrder
from astuner.backbone.training.session import TrainingSession
from astuner.backbone.training.sync_certificate import SyncCertificate, probe_params, probe_prompt
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.doors import through_door
from astuner.errors import BackboneError, first_line
from astuner.llm_engine.causal_lm import choose_device
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.protocol import EngineWithStartingModel
from astuner.schema import Episode
from astuner.system.loop_thread import run_to_end
from astuner.task_rollout.rollout import BatchRequest, OnEpisode, TaskRollout

if TYPE_CHECKING:
    from astuner.algorithms.distillation.distiller import Distiller

_ENGINE = "the embedded engine"
_STATE_FILE = "trainer.pt"
_MODEL_DIR = "model"
# The shortest interval over which idle cores are measured.
_MIN_MEASURED_SECONDS = 0.5


class LocalBackbone(SessionBackbone):
    """Trains with PyTorch in this process and samples with the embedded engine."""

    @contextlib.contextmanager
    def session(self, context: RunContext, *, trains: bool) -> Iterator[LocalSession]:
        """Load the policy, and close the session after the block."""
        config = context.config.astuner
        with reported_memory_errors(config), contextlib.ExitStack() as stack:
            device = choose_device(config.trainer_common.device)
            if config.trainer_common.deterministic:
                stack.enter_context(deterministic_operations(device))
            torch.manual_seed(config.trainer_common.seed)
            with context.phase("load_model"):
                policy = Policy(config.model, context.run_inputs.model_path, device, config.update.pack)
            yield stack.enter_context(contextlib.closing(LocalSession(context, policy)))

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Do nothing: this backbone uses no other service, so that `preflight` checks everything."""

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check nothing: the checks of the configuration cover this backbone."""

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate a run's memory from the model's shape."""
        estimate: MemoryEstimate = through_door("memory", "local")(config, run_inputs)
        return estimate


@contextlib.contextmanager
def reported_memory_errors(config: AstunerConfig) -> Iterator[None]:
    """Raise the block's out-of-memory errors as BackboneError, with the keys that reduce memory use."""
    try:
        yield
    except RuntimeError as error:
        # torch.OutOfMemoryError is a RuntimeError; for the CPU there is no class.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        tokens = config.trainer_common.max_tokens_per_micro_batch
        raise BackboneError(
            f"out of memory: {first_line(error)}. Lower trainer_common.max_tokens_per_micro_batch ({tokens}) or "
            "rollout.max_num_seqs, set model.gradient_checkpointing, or train adapters (model.lora.rank: 16); "
            "`astuner check` estimates the memory of each part"
        ) from error


@contextlib.contextmanager
def deterministic_operations(device: torch.device) -> Iterator[None]:
    """Make PyTorch choose deterministic kernels in the block, and keep the number of CPU threads.

    Sums then have a fixed order, and an operation without a deterministic kernel raises an error. On CUDA, cuBLAS
    gets a workspace that no other stream uses. See https://docs.pytorch.org/docs/stable/notes/randomness.html.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_num_threads(threads)


class LocalSession(TrainingSession):
    """A policy, its optimizer, and an embedded engine that samples from it.

    A checkpoint `checkpoints/step_000020/` holds the tuned `model/`, and `trainer.pt` with the state of the trainer.
    """

    def __init__(self, context: RunContext, policy: Policy) -> None:
        self.context = context
        self.policy = policy
        self._config = context.config.astuner
        self.spare_cores = SpareCores(adapts=not self._config.trainer_common.deterministic)
        keep = self._config.trainer_common.max_checkpoints_to_keep
        self._checkpoints = CheckpointFolder(context.record.folder / "checkpoints", keep)
        self._distiller: Distiller | None = None
        self._certificate = SyncCertificate(policy.dtype)
        self._engine: EmbeddedEngine | None = None
        self._starting_model: EmbeddedEngine | None = None
        self._rollout: TaskRollout | None = None

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer of the policy. Created lazily."""
        common = self._config.trainer_common
        order = TaskOrder.from_config(self._config, self.context.run_inputs.tasks)
        total_steps = order.total_steps(common.total_epochs, common.total_training_steps)
        return Optimizer(self.policy.trainable(), common.optim, total_steps)

    @cached_property
    def _policy_update(self) -> PolicyUpdate:
        algorithm = resolve(self._config.trainer_common.algorithm)
        on_rows = self.context.progress.advance
        return PolicyUpdate(self._config, algorithm, self.policy, self.optimizer, on_rows, self._distiller)

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype that the model computes in."""
        return str(self.policy.dtype).removeprefix("torch.")

    def roll_out(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Run the episodes in threads of this process, or in worker processes."""
        assert self._engine is not None
        assert self._rollout is not None
        episodes = self._rollout.run(request, on_episode, on_attempt)
        for engine in filter(None, (self._engine, self._starting_model)):
            engine.raise_if_broken()
        return episodes

    def update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Update the weights."""
        assert self._engine is not None
        for engine in filter(None, (self._engine, self._starting_model)):
            engine.free_cache()
        return_free_memory()
        self.policy.prepare_update()
        try:
            return self._policy_update.step(episodes, step)
        finally:
            return_free_memory()

    def sync(self, step: int) -> None:
        """Copy the policy's weights to the engine, which is started by the first call."""
        if self._engine is None:
            with self.context.phase("load_model"):
                self._distiller = self._load_distiller()
                self._engine = self._new_engine()
                if self._config.rollout.uses_starting_model:
                    self._starting_model = self._new_engine()
            context, engine = self.context, self._engine
            engines = EngineWithStartingModel(engine, self._starting_model) if self._starting_model else engine
            self._rollout = make_rollout(self._config, context.run_inputs, engines, context.active_episodes)
        else:
            self.spare_cores.adapt_threads()
        self._engine.update_weights(self.policy.full_weights(), step)
        self._compare_weights(self._engine, step)
        if self._certificate.probe_is_due:
            self._compare_logprobs(self._engine, step)
        return_free_memory()

    def _load_distiller(self) -> Distiller | None:
        if self._config.trainer_common.distillation.teacher is None:
            return None
        inputs, policy = self.context.run_inputs, self.policy
        max_tokens = self._config.trainer_common.max_tokens_per_micro_batch
        distiller: Distiller = through_door("teacher", "load")(
            self._config,
            inputs.codec,
            inputs.tasks,
            teacher_path=inputs.teacher_path,
            device=policy.device,
            policy=through_door("teacher", "model")(policy.model, max_tokens, policy.autocast),
        )
        return distiller

    def _compare_weights(self, engine: EmbeddedEngine, step: int) -> None:
        with self._certificate.timed():
            self._certificate.begin(self.policy.weight_digests())
            self._certificate.check_digests(_ENGINE, step, engine.weight_digests())

    @torch.no_grad()
    def _compare_logprobs(self, engine: EmbeddedEngine, step: int) -> None:
        """Compare the engine's logprobs for a few tokens that it samples with the policy's."""
        with self._certificate.timed_probe():
            prompt = probe_prompt(self.context.run_inputs.tokenizer)[: engine.max_model_len - 1]
            params = probe_params(self._config.rollout.temperature, engine.max_model_len - len(prompt))
            completion = run_to_end(engine.generate(prompt, params))
            ids = torch.tensor([(*prompt, *completion.token_ids)], device=self.policy.device)
            mask = torch.zeros_like(ids)
            mask[:, len(prompt) :] = 1
            with self.policy.autocast():
                logprobs, _ = token_logprobs(self.policy.model, ids, mask, params.temperature)
            trained = logprobs[0, len(prompt) :].tolist()
            self._certificate.check_logprobs(_ENGINE, step, completion.logprobs, trained)

    def _new_engine(self) -> EmbeddedEngine:
        # Batches and the prefix cache change the rounding from run to run.
        is_serial = self._config.trainer_common.deterministic
        return EmbeddedEngine(
            self.policy.frozen_copy(),
            max_model_len=min(self._config.rollout.max_model_len, self.policy.max_length),
            max_num_seqs=1 if is_serial else self._config.rollout.max_num_seqs,
            prefix_cache_tokens=0 if is_serial else None,
            tokenizer=self.context.run_inputs.tokenizer,
        )

    def save(self, step: int, progress: dict[str, Any]) -> bool:
        """Write the checkpoint of `step`."""
        state = {
            "trained": self.policy.training_state(),
            "optimiser": self.optimizer.state(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
            "progress": {**progress, "step": step},
            "total_steps": self.optimizer.total_steps,
        }

        def write(folder: Path) -> None:
            self.save_model(folder / _MODEL_DIR, step)
            save_synced(state, folder / _STATE_FILE)

        self._checkpoints.write(step, write)
        return True

    def load(self) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress, or None if there is no checkpoint."""
        checkpoint = self._checkpoints.newest()
        if checkpoint is None:
            return None
        state = read_state(checkpoint, self.policy.device)
        try:
            self.policy.load_training_state(state["trained"])
            self.optimizer.load(state["optimiser"])
            torch.set_rng_state(state["rng"].cpu())
            torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
            progress: dict[str, Any] = state["progress"]
        except Exception as error:  # a state of other tensors or without some of them
            raise unreadable(checkpoint, first_line(error)) from error
        self._checkpoints.remove_old()
        return progress

    def save_model(self, folder: Path, step: int) -> None:
        """Write the model as a Hugging Face folder, with adapters merged."""
        self.policy.save(folder, self.context.run_inputs.codec)

    def close(self) -> None:
        """Stop the engine and the threads that run episodes."""
        if self._rollout is not None:
            self._rollout.close()
        if self._distiller is not None:
            self._distiller.close()
        for engine in filter(None, (self._engine, self._starting_model)):
            engine.close()


def read_state(checkpoint: Path, device: torch.device) -> dict[str, Any]:
    """Return the trainer's state in a checkpoint, with tensors on `device`; RecordError: it cannot be read."""
    try:
        state: dict[str, Any] = torch.load(checkpoint / _STATE_FILE, map_location=device, weights_only=True)
    except Exception as error:  # PyTorch and pickle raise errors of many types for a damaged file
        raise unreadable(checkpoint, first_line(error)) from error
    return state


class SpareCores:
    """Adapts PyTorch's threads to the cores that other processes leave idle.

    An operation ends when its slowest thread ends, so a thread without a core delays all others. On two cores, two runs
    with two threads each take three times as long as two runs with one thread each.

    Args:
        adapts: False to keep the number of threads, on which rounding depends.
    """

    def __init__(self, *, adapts: bool = True) -> None:
        self._adapts = adapts
        self._max_threads = torch.get_num_threads()
        self._process = psutil.Process()
        self._last = self._measure()

    def adapt_threads(self) -> None:
        """Set the number of threads to the cores that were idle since the last call, at most the initial number."""
        if not self._adapts:
            return
        now = self._measure()
        seconds, busy = now[0] - self._last[0], now[1] - self._last[1]
        # The system counts hundredths of a second, so a short interval is too inaccurate.
        if seconds >= _MIN_MEASURED_SECONDS:
            idle = (psutil.cpu_count() or self._max_threads) - max(busy / seconds, 0.0)
            torch.set_num_threads(min(max(round(idle), 1), self._max_threads))
            self._last = now

    def _measure(self) -> tuple[float, float]:
        """Return the time in seconds, and the CPU seconds of processes other than this one and its children."""
        system, this = psutil.cpu_times(), self._process.cpu_times()
        total = system.user + system.system + getattr(system, "nice", 0.0)
        return time.monotonic(), total - this.user - this.system - this.children_user - this.children_system
