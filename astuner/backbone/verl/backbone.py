"""The verl backbone: verl's workers and engines on a Ray cluster, with astuner's episodes, algorithms and record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loguru import logger

from astuner.backbone.base import MemoryEstimate, PreflightContext, RunContext, StartedRay, is_own_ray
from astuner.backbone.memory.estimate import BatchShape, process_estimate
from astuner.backbone.packing.packed_attention import has_packed_attention
from astuner.backbone.ray_cluster.connection import check_has_no_gpus, check_not_connected, find_gpus, find_ray
from astuner.backbone.ray_cluster.nodes import lost_nodes_named
from astuner.backbone.ray_cluster.worker_server import can_fork_workers
from astuner.backbone.training.checkpoints import RESUME_HINT
from astuner.backbone.training.lora import check_target_modules
from astuner.backbone.training.rl_loop import SessionBackbone
from astuner.backbone.training.run_inputs import RunInputs
from astuner.backbone.training.schedule import TaskOrder
from astuner.backbone.verl.rules import RolloutEngine, VerlRunFacts
from astuner.backbone.verl.trainer_config import compose_verl_config
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.trainer import TrainerCommonConfig
from astuner.errors import BackboneError, first_line
from astuner.llm_engine.causal_lm import choose_device, compute_dtype
from astuner.llm_engine.context_length import context_length
from astuner.llm_engine.vllm_server.settings import check_head_size
from astuner.system.paths import is_installed

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from astuner.backbone.verl.session import VerlSession


class VerlBackbone(SessionBackbone):
    """Trains with verl, on one machine or many."""

    @contextlib.contextmanager
    def session(self, context: RunContext, *, trains: bool) -> Iterator[VerlSession]:
        """Start Ray, verl's workers and engines, and the episode workers; stop them after the block."""
        from astuner.backbone.verl.cluster import ray_running, verl_environment, verl_worker_server

        config = context.config.astuner
        facts = _run_facts(context.preflight_context)
        with contextlib.ExitStack() as stack:
            environment = stack.enter_context(verl_environment(facts.device, own_ray=context.has_own_ray))
            server = None
            # vLLM computes with the threads that OMP_NUM_THREADS has set when PyTorch was imported.
            if context.has_own_ray and facts.rollout_engine == "embedded" and can_fork_workers(facts.device):
                server = stack.enter_context(verl_worker_server(environment))
            composed = compose_verl_config(context.config, facts)
            if facts.device == "cuda" and config.trainer_common.n_gpus_per_node is None:
                gpus = composed.trainer.n_gpus_per_node
                logger.warning("trainer_common.n_gpus_per_node is not set: {} GPUs of each machine are used", gpus)
            stack.enter_context(_ray_errors_explained())
            logger.info("starting Ray, verl's workers and engines; this takes up to a minute")
            stack.enter_context(ray_running(composed, environment, server))
            stack.enter_context(lost_nodes_named(RESUME_HINT))
            if not context.has_own_ray and facts.device == "cpu" and config.trainer_common.device == "auto":
                check_has_no_gpus(  # nodes with GPUs may have joined since then
                    "this machine and the Ray cluster had no GPU when the run started",
                    "Run the same command again with trainer_common.ray_address",
                )
            with context.phase("load_model"):
                session = _start_session(context, composed, facts, stack)
            yield session

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Check that verl supports the configuration on this machine."""
        from astuner.backbone.verl.cluster import verl_environment

        run, device = config.astuner, _configured_device(config.astuner)
        # What depends on the model and the tasks is checked in `preflight`.
        facts = VerlRunFacts(
            device="cuda" if device.type == "cuda" else "cpu",
            rollout_engine=_rollout_engine(run, device),
            model_path=run.model.path,
            checkpoint_folder=Path(run.experiment_dir) / "checkpoints",
            ray=ray,
            origins=origins,
        )
        if Path(run.model.path).is_dir():  # otherwise, `preflight` checks it
            check_target_modules(run.model.lora, run.model.path)
        with verl_environment(facts.device, own_ray=is_own_ray(run.trainer_common.ray_address, ray)):
            check_not_connected()
            compose_verl_config(config, facts)
        if facts.rollout_engine == "embedded" and run.rollout.name == "vllm":
            logger.warning("rollout.name: vllm is ignored: vLLM is not installed here, and verl samples without it")
        if facts.rollout_engine == "vllm" and run.rollout.name == "embedded":
            logger.warning("rollout.name: embedded is ignored: verl samples from vLLM on GPUs")

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check that verl and its engine support the configuration, and that Ray is reachable."""
        from astuner.backbone.verl.cluster import verl_environment

        address = preflight_context.config.astuner.trainer_common.ray_address
        facts = _run_facts(preflight_context)
        with verl_environment(facts.device, own_ray=is_own_ray(address, preflight_context.ray)):
            check_not_connected()
            compose_verl_config(preflight_context.config, facts)
            check_target_modules(preflight_context.config.astuner.model.lora, facts.model_path)
            if address is not None:
                find_ray(address)

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate the memory of this process; the model is in others, possibly on other machines."""
        return process_estimate(
            config,
            BatchShape.of(config, run_inputs),
            excluded="verl's workers, engines and episode workers, which hold the model",
        )


@contextlib.contextmanager
def _ray_errors_explained() -> Iterator[None]:
    """Turn the errors of Ray about its processes into errors that explain what to do."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayError as error:
        has_traceback = isinstance(error, RayTaskError)
        cause = error.cause if has_traceback else error
        where = "run.log has its traceback" if has_traceback else "it died without a traceback"
        raise BackboneError(
            f"a process of verl failed: {first_line(cause)}. {where}; if it ran out of memory, lower "
            f"trainer_common.max_tokens_per_micro_batch. {RESUME_HINT}"
        ) from error


def _start_session(
    context: RunContext, composed: DictConfig, facts: VerlRunFacts, stack: contextlib.ExitStack
) -> VerlSession:
    # These modules read the environment when they are imported.
    from astuner.backbone.episode_workers.messages import AgentJob
    from astuner.backbone.verl.episode_hosts import EpisodeHosts
    from astuner.backbone.verl.rollout_engine import VerlEngine
    from astuner.backbone.verl.session import VerlSession
    from astuner.backbone.verl.trainer import started_trainer

    config = context.config.astuner
    dtype = compute_dtype(config.model.dtype, torch.device(facts.device))
    trainer = stack.enter_context(started_trainer(composed, config, dtype))
    engine = VerlEngine(trainer.get_llm_client(), composed.actor_rollout_ref.rollout.max_model_len)
    agent = AgentJob.of(config, context.run_inputs, facts.model_path)
    hosts = EpisodeHosts(agent, engine, context.active_episodes)
    stack.callback(hosts.close)
    hosts.start()
    return VerlSession(context, trainer, hosts, dtype, facts.total_steps)


def _configured_device(run: AstunerConfig) -> torch.device:
    """Return `workers_device`, without asking a Ray instance that a service of the run may start later."""
    common = run.trainer_common
    if not run.services or common.ray_address is None:
        return workers_device(common)
    uses_gpu = common.device == "cuda" or (common.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if uses_gpu else "cpu")


def workers_device(common: TrainerCommonConfig) -> torch.device:
    """Return the device of verl's workers and engines.

    They run on the nodes of a Ray instance that the run joins. The main process needs no GPU: it prepares rows on the
    CPU. So this machine may be a login node.

    Raises:
        BackboneError: `device` is `cuda`, and there is no GPU; or Ray does not answer.
    """
    address = common.ray_address
    if address is None or common.device == "cpu" or torch.cuda.is_available():
        return choose_device(common.device)
    types = find_gpus(address)
    if common.device == "cuda" and not types:
        raise BackboneError(
            f"trainer_common.device is cuda, but neither this machine nor a node of the Ray cluster at {address} has a "
            "GPU; use device: auto or cpu"
        )
    return torch.device("cuda" if types else "cpu")


def _rollout_engine(config: AstunerConfig, device: torch.device) -> RolloutEngine:
    """Return the engine: on a CPU without vLLM, the embedded one; on GPUs vLLM."""
    engine = config.rollout.name
    if engine == "auto" or device.type == "cuda":
        engine = "vllm" if device.type == "cuda" else "embedded"
    if engine == "vllm" and not is_installed("vllm"):
        if device.type == "cpu":
            return "embedded"
        raise BackboneError("verl samples from vLLM on GPUs, but vLLM is not installed; run: astuner install verl")
    return engine


def _run_facts(preflight_context: PreflightContext) -> VerlRunFacts:
    """Return the values of verl's configuration that depend on the model, the tasks and the device."""
    from transformers import AutoConfig

    config, inputs = preflight_context.config.astuner, preflight_context.run_inputs
    common, path = config.trainer_common, inputs.model_path
    device = workers_device(common)
    text_config = AutoConfig.from_pretrained(path).get_text_config()
    engine = _rollout_engine(config, device)
    if engine == "vllm" and device.type == "cpu":
        check_head_size(path, text_config)
    order = TaskOrder.from_config(config, inputs.tasks)
    return VerlRunFacts(
        device="cuda" if device.type == "cuda" else "cpu",
        rollout_engine=engine,
        # The workers have another working directory.
        model_path=str(Path(path).resolve()) if Path(path).exists() else path,
        checkpoint_folder=preflight_context.folder / "checkpoints",
        total_steps=order.total_steps(common.total_epochs, common.total_training_steps),
        n_val=len(inputs.tasks.validation),
        max_positions=context_length(text_config),
        heads=getattr(text_config, "num_attention_heads", 0),
        packed_attention=has_packed_attention(text_config),
        ray=preflight_context.ray,
        origins=preflight_context.origins,
    )
