"""verl's trainer and engines with astuner's episode workers: what training and evaluation work with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger

from astuner.backbone.base import Prospect, RunContext
from astuner.backbone.batch import Batch, run_batch
from astuner.backbone.causal_lm import choose_device, compute_dtype
from astuner.backbone.cluster.head import is_own_ray
from astuner.backbone.cluster.joining import refuse_missing_ray
from astuner.backbone.progress_state import RunState
from astuner.backbone.session import Session
from astuner.backbone.task_order import TaskOrder
from astuner.backbone.verl.composition import compose_verl_config
from astuner.backbone.verl.plan import RolloutEngine, VerlPlan
from astuner.backbone.vllm_server.on_cpu import refuse_unknown_heads
from astuner.breakpoints import chosen
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.model_tuner import first_line
from astuner.task_rollout import BatchRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from astuner.backbone.verl.client_engine import VerlEngine
    from astuner.backbone.verl.fleet import EpisodeFleet
    from astuner.backbone.verl.trainer import VerlTrainer


@dataclass
class VerlSession(Session):
    """A model on verl's workers, engines that sample from it, and workers that run episodes.

    Attributes:
        context: the run.
        state: counters.
        trainer: started.
        fleet: started.
        engine: all of verl's engines.
        dtype: what the model computes in.
    """

    trainer: VerlTrainer
    fleet: EpisodeFleet
    engine: VerlEngine
    dtype: torch.dtype

    def roll_out(self, request: BatchRequest, name: str) -> Batch:
        """Run the episodes on the workers.

        Raises:
            ModelError: an engine is gone.
        """
        batch = run_batch(self.context, self.fleet, request, name)
        self.refuse_lost_engines()
        return batch

    def refuse_lost_engines(self) -> None:
        """Say so where an engine can no longer answer.

        Raises:
            ModelError: with what ended it.
        """
        from astuner.backbone.verl.engine_health import refuse_lost_engines

        refuse_lost_engines(self.trainer.servers)

    def sync(self) -> None:
        """Hand the engines the weights as they are after `state.step` steps, and make sure that they arrived.

        Raises:
            BackboneError: they did not.
        """
        from astuner.backbone.verl.sync_check import check_first_sync

        self.trainer.free_engines()  # verl's engines take weights while they sleep
        self.push_weights(self.state.step)
        tokenizer = self.ingredients.tokenizer
        prompt = tokenizer.encode("The first sync of weights", add_special_tokens=False)
        check_first_sync(self.trainer, self.engine, prompt, self.dtype, self.config.rollout.temperature or 1.0)

    def push_weights(self, version: int) -> None:
        """Hand the engines the weights as policy version `version`.

        Raises:
            ModelError: an engine is gone.
        """
        self.refuse_lost_engines()  # verl would wait without end for one that is to take weights
        self.trainer.sync_weights(version)
        self.fleet.policy_version = version

    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, adapters merged in."""
        self.trainer.save_model(folder, str(self.dtype).removeprefix("torch."))
        self.ingredients.codec.save(folder)


def refuse_unfit(prospect: Prospect) -> None:
    """Find out without starting anything what would end a run of this configuration.

    Raises:
        AstunerError: what, and what to do.
    """
    from astuner.backbone.verl.cluster import environment_prepared

    address = prospect.config.astuner.trainer_common.ray_address
    plan = _plan(prospect)
    with environment_prepared(plan.device, own=is_own_ray(address, prospect.ray)):
        compose_verl_config(prospect.config, plan)
        refuse_missing_ray(address)


@contextlib.contextmanager
def verl_session(context: RunContext) -> Iterator[VerlSession]:
    """Start Ray, verl's workers and engines, and the episode workers; end all that was started afterwards.

    Raises:
        AstunerError: the configuration does not fit, or something does not start.
    """
    from astuner.backbone.verl.cluster import environment_prepared, ray_running

    config = context.config.astuner
    plan = _plan(context.prospect)
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(environment_prepared(plan.device, own=context.has_own_ray))
        composed = compose_verl_config(context.config, plan)
        if plan.device == "cuda" and config.trainer_common.n_gpus_per_node is None:
            gpus = composed.trainer.n_gpus_per_node
            logger.warning("trainer_common.n_gpus_per_node is not set: {} GPUs of each machine are used", gpus)
        stack.enter_context(_failures_named())
        logger.info("starting Ray, verl's workers and engines; that takes about a minute")
        stack.enter_context(ray_running(composed, environment))
        with context.phase("load_model"):
            session = _started(context, composed, plan, stack)
        yield session


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    """Turn what Ray raises of its processes into an error that says what to do.

    Raises:
        BackboneError: a process of verl's raised or died.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayError as error:
        raised = isinstance(error, RayTaskError)
        cause = error.cause if raised else error
        where = "run.log has its traceback" if raised else "it died without a traceback"
        raise BackboneError(
            f"a process of verl's failed: {first_line(cause)}. {where}; where memory was short, "
            "lower trainer_common.max_tokens_per_micro_batch. The same command goes on from the last checkpoint"
        ) from error


def _plan(prospect: Prospect) -> VerlPlan:
    config = prospect.config.astuner
    device = choose_device(config.trainer_common.device)
    tasks = prospect.ingredients.tasks
    order = TaskOrder(tasks.training, config.data.train_batch_size, None)
    common = config.trainer_common
    path = prospect.ingredients.model_path
    engine = _engine(config, device)
    if engine == "vllm":
        _refuse_unfit_for_vllm(path, device)
    return VerlPlan(
        device="cuda" if device.type == "cuda" else "cpu",
        rollout_engine=engine,
        # Workers have another working directory.
        model_path=str(Path(path).resolve()) if Path(path).exists() else path,
        checkpoint_folder=prospect.folder / "checkpoints",
        total_steps=order.total_steps(common.total_epochs, common.total_training_steps),
        n_val=len(tasks.validation),
        max_positions=_positions(path),
        ray=prospect.ray,
        origins=prospect.origins,
    )


def _positions(path: str) -> int | None:
    """Return how many positions the model has, where its configuration says."""
    positions = getattr(_shape(path), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _shape(path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config()


def _refuse_unfit_for_vllm(path: str, device: torch.device) -> None:
    """Find out before anything starts that vLLM is not here, or cannot compute the model.

    Raises:
        BackboneError: it is not installed.
        ModelError: its attention on a CPU does not do.
    """
    if find_spec("vllm") is None:
        command = "astuner install verl" + (" --cpu --vllm" if device.type == "cpu" else "")
        without = "; or write rollout.name: embedded" if device.type == "cpu" else ""
        raise BackboneError(f"rollout.name is vllm, and vLLM is not installed here; run: {command}{without}")
    if device.type == "cpu":
        refuse_unknown_heads(path, _shape(path))


def _engine(config: AstunerConfig, device: torch.device) -> RolloutEngine:
    if config.rollout.name != "auto":
        return config.rollout.name
    return "vllm" if device.type == "cuda" else "embedded"


def _started(context: RunContext, composed: DictConfig, plan: VerlPlan, stack: contextlib.ExitStack) -> VerlSession:
    from astuner.backbone.verl.client_engine import VerlEngine
    from astuner.backbone.verl.episode_worker import WorkerJob
    from astuner.backbone.verl.fleet import EpisodeFleet
    from astuner.backbone.verl.trainer import started_trainer

    config = context.config.astuner
    dtype = compute_dtype(config.model.dtype, torch.device(plan.device))
    trainer = stack.enter_context(started_trainer(composed, config, dtype))
    engine = VerlEngine(trainer.get_llm_client(), composed.actor_rollout_ref.rollout.max_model_len)
    job = WorkerJob(config, context.ingredients.search, Path.cwd(), plan.model_path, chosen(), engine)
    fleet = EpisodeFleet(job, context.running)
    stack.callback(fleet.close)
    fleet.start()
    return VerlSession(context, RunState(), trainer, fleet, engine, dtype)
