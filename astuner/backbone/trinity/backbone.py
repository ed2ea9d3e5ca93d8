"""The trinity backbone: Trinity's explorer and trainer on a Ray cluster, with astuner's episodes and algorithms."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger

from astuner.backbone.base import MemoryEstimate, PreflightContext, RunContext, StartedRay, is_own_ray
from astuner.backbone.episode_workers.messages import AgentJob
from astuner.backbone.memory.estimate import BatchShape, process_estimate
from astuner.backbone.ray_cluster.connection import check_has_no_gpus, check_not_connected, find_ray, ray_connected
from astuner.backbone.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
from astuner.backbone.ray_cluster.nodes import check_can_reach, living_nodes, lost_nodes_named
from astuner.backbone.ray_cluster.worker_server import can_fork_workers, worker_server
from astuner.backbone.training.checkpoints import RESUME_HINT
from astuner.backbone.training.lora import check_target_modules
from astuner.backbone.training.rl_loop import SessionBackbone
from astuner.backbone.training.run_inputs import RunInputs
from astuner.backbone.training.schedule import TaskOrder
from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.backbone.trinity.checkpoint import TrinityCheckpoints, TrinityState
from astuner.backbone.trinity.preflight import MIN_GPUS
from astuner.backbone.trinity.rules import Device, Mode, TrinityRunFacts, engine_count, runners_per_engine
from astuner.backbone.trinity.tinker_service import LOCAL_KEY, RemoteTinkerService, local_tinker_server
from astuner.backbone.trinity.trainer_config import (
    check_trinity_config,
    check_without_ray,
    configured_tinker_service,
    trinity_config,
)
from astuner.backbone.trinity.training_backends import TrainingBackend, VerlTrainingBackend
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.llm_engine.causal_lm import choose_device
from astuner.llm_engine.context_length import context_length
from astuner.system.localhost import ADDRESS
from astuner.system.paths import python_path

if TYPE_CHECKING:
    from astuner.backbone.trinity.session import TrinitySession

_ONE_MACHINE = (
    "leave trainer_common.ray_address out, or set trinity.model.tinker.base_url to the address of an `astuner "
    "serve-tinker` that all nodes can reach"
)

# Folders in the run record: Trinity's state, and the output of the Tinker server.
_STATE_DIR, _SERVER_DIR = "trinity", "tinker"

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TINKER_TELEMETRY": "0",
    # Trinity's default loads every installed plugin of vLLM.
    "VLLM_PLUGINS": "none",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # For the launcher; the log files of Trinity's processes follow Trinity's configuration.
    "TRINITY_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}

# What Trinity's modules and astuner's workers import, except for Ray and modules that import it.
_WORKER_MODULES = (
    "astuner.backbone.episode_workers.process",
    "datasets",
    "omegaconf",
    "pandas",
    "tinker",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "transformers",
    "wandb",
)


class TrinityBackbone(SessionBackbone):
    """Trains with Trinity-RFT, which runs episodes while it trains on earlier ones."""

    @contextlib.contextmanager
    def session(self, context: RunContext, *, trains: bool) -> Iterator[TrinitySession]:
        """Start Ray, Trinity's explorer and trainer, and a Tinker server if needed; stop them after the block."""
        config, record = context.config.astuner, context.record.folder.absolute()
        checkpoints = TrinityCheckpoints(record / "checkpoints", config.trainer_common.max_checkpoints_to_keep)
        with contextlib.ExitStack() as stack:
            training_backend = _configured_training_backend(context.config)
            if training_backend is None:
                model = _resolved_model_path(context.run_inputs.model_path)
                server = local_tinker_server(model, config, _server_device(config), record / _SERVER_DIR)
                training_backend = stack.enter_context(server)
            environment = stack.enter_context(_trinity_environment(context.has_own_ray, training_backend))
            state = TrinityState(record / _STATE_DIR, training_backend)
            state.clear()
            if trains and (checkpoint := checkpoints.newest()) is not None:
                state.restore(checkpoint, config.trainer_common.mini_batch_num)
            with context.phase("load_model"):
                runtime_env: dict[str, Any] = dict(training_backend.ray_runtime_env)
                if context.has_own_ray and can_fork_workers(training_backend.device):
                    own = environment | {"PYTHONPATH": os.pathsep.join(training_backend.python_path)}
                    runtime_env["py_executable"] = stack.enter_context(worker_server(_WORKER_MODULES, own)).executable
                training_backend.prepare_imports()
                python_folders = python_path(*training_backend.python_path)
                runtime_env["env_vars"] = {**environment, "PYTHONPATH": python_folders}
                mode: Mode = "both" if trains else "bench"
                session = _start_session(context, mode, training_backend, state, checkpoints, runtime_env, stack)
            yield session

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Check that Trinity supports the configuration on this machine."""
        run, training_backend = config.astuner, _planned_training_backend(config)
        if Path(run.model.path).is_dir():  # otherwise, `preflight` checks it
            check_target_modules(run.model.lora, run.model.path)
        # What depends on the model and the tasks is checked in `preflight`.
        facts = TrinityRunFacts(
            mode="both" if trains else "bench",
            device=training_backend.device,
            model_path=run.model.path,
            checkpoint_root_dir=Path(run.experiment_dir).absolute() / _STATE_DIR,
            total_steps=1,
            namespace="astuner",
            max_model_len=run.rollout.max_model_len,
            tinker_base_url=training_backend.tinker_url,
            takes_policy=training_backend.takes_policy,
            runners=runners_per_engine(run, engine_count(run, uses_tinker=training_backend.tinker_url is not None)),
            origins=origins,
        )
        with _trinity_environment(is_own_ray(run.trainer_common.ray_address, ray), training_backend):
            training_backend.prepare_imports()
            check_not_connected()
            check_without_ray(trinity_config(config, facts), has_model=False)

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check that Trinity supports the configuration, and that Ray is reachable if the run joins it."""
        address = preflight_context.config.astuner.trainer_common.ray_address
        training_backend = _planned_training_backend(preflight_context.config)
        mode: Mode = "both" if preflight_context.trains else "bench"
        with _trinity_environment(is_own_ray(address, preflight_context.ray), training_backend):
            training_backend.prepare_imports()
            check_not_connected()
            facts = _run_facts(preflight_context, mode, training_backend, "astuner")
            check_without_ray(trinity_config(preflight_context.config, facts), has_model=True)
            check_target_modules(preflight_context.config.astuner.model.lora, facts.model_path)
            if address is not None:
                find_ray(address)

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate the memory of this process; the model is in others, possibly on other machines."""
        return process_estimate(
            config,
            BatchShape.of(config, run_inputs),
            excluded="Trinity's explorer, trainer and engines, which hold the model",
        )


def on_gpus(config: AstunerConfig) -> bool:
    """Return whether vLLM and verl's workers sample and train on GPUs: `device` is cuda, or auto with enough GPUs.

    They do not train adapters: vLLM's server under Trinity answers without them.
    """
    device = config.trainer_common.device
    has_gpus = device == "cuda" or (device == "auto" and torch.cuda.device_count() >= MIN_GPUS)
    return has_gpus and not config.model.lora.rank


def _server_device(config: AstunerConfig) -> Device:
    """Return the device of the run's own Tinker server: one GPU for adapters if there is one, else the CPU."""
    uses_gpu = config.model.lora.rank > 0 and choose_device(config.trainer_common.device).type == "cuda"
    return "cuda" if uses_gpu else "cpu"


def _check_nodes(context: RunContext) -> None:
    config = context.config.astuner
    if not context.has_own_ray and config.trainer_common.device == "auto" and _server_device(config) == "cpu":
        check_has_no_gpus(
            f"this machine has fewer than {MIN_GPUS} GPUs",
            "Set trainer_common.device=cuda and trainer_common.n_gpus_per_node to train on them",
        )
    check_can_reach("the run's Tinker server", living_nodes().values(), _ONE_MACHINE)


def _configured_training_backend(config: RunConfig) -> TrainingBackend | None:
    url = configured_tinker_service(config)
    if url is not None:
        return RemoteTinkerService.probed(url, TinkerPolicy.from_config(config.astuner))
    return VerlTrainingBackend() if on_gpus(config.astuner) else None


def _planned_training_backend(config: RunConfig) -> TrainingBackend:
    """Return the training backend for checks; the server that the run starts has no port yet."""
    return _configured_training_backend(config) or RemoteTinkerService(
        f"http://{ADDRESS}", LOCAL_KEY, takes_policy=True, device=_server_device(config.astuner)
    )


def _trinity_environment(
    own_ray: bool, training_backend: TrainingBackend
) -> contextlib.AbstractContextManager[dict[str, str]]:
    return environment_set({**(OWN_ENVIRONMENT if own_ray else {}), **_ENVIRONMENT, **training_backend.environment})


def _start_session(
    context: RunContext,
    mode: Mode,
    training_backend: TrainingBackend,
    state: TrinityState,
    checkpoints: TrinityCheckpoints,
    runtime_env: dict[str, Any],
    stack: contextlib.ExitStack,
) -> TrinitySession:
    config = context.config.astuner
    logger.info("starting Ray and Trinity's explorer and trainer; this takes up to a minute")
    namespace = f"astuner-{context.record.folder.name}-{os.getpid()}"
    facts = _run_facts(context.preflight_context, mode, training_backend, namespace)
    composed = trinity_config(context.config, facts)
    address = context.ray.address if context.ray else config.trainer_common.ray_address
    runtime_env["env_vars"] |= composed.get_envs()
    stack.enter_context(ray_connected({"address": address, "namespace": namespace, "runtime_env": runtime_env}))
    stack.enter_context(lost_nodes_named(RESUME_HINT))
    if facts.uses_tinker and configured_tinker_service(context.config) is None:  # the run has a server of its own
        _check_nodes(context)
    # These modules import Trinity and Ray.
    from astuner.backbone.trinity.actors import trinity_actors
    from astuner.backbone.trinity.coordinator import CoordinatorJob, start_coordinator
    from astuner.backbone.trinity.event_consumer import EventConsumer
    from astuner.backbone.trinity.session import TrinitySession

    processes = engine_count(config, uses_tinker=facts.uses_tinker) * facts.runners
    share = config.rollout.model_copy(update={"max_env_worker": max(1, config.rollout.max_env_worker // processes)})
    coordinator = start_coordinator(
        CoordinatorJob(
            agent=AgentJob.of(config.model_copy(update={"rollout": share}), context.run_inputs, facts.model_path),
            uses_tinker=facts.uses_tinker,
            max_model_len=facts.max_model_len,
            updates=config.trainer_common.mini_batch_num,
            runners=processes,
            teacher_path=context.run_inputs.teacher_path,
        )
    )
    training_backend.wait_until_ready(config.deadlines.load_model or 3600.0)
    stack.callback(training_backend.keep_actors_here())
    actors = stack.enter_context(
        trinity_actors(check_trinity_config(composed), training_backend.trainer_class(), training_backend.check_alive)
    )
    event_consumer = EventConsumer(config, coordinator, actors)
    actors.prepare(config.deadlines.load_model)
    return TrinitySession(context, actors, event_consumer, facts, training_backend, state, checkpoints)


def _run_facts(
    preflight_context: PreflightContext, mode: Mode, training_backend: TrainingBackend, namespace: str
) -> TrinityRunFacts:
    from transformers import AutoConfig

    config, tasks = preflight_context.config.astuner, preflight_context.run_inputs.tasks
    common = config.trainer_common
    model = _resolved_model_path(preflight_context.run_inputs.model_path)
    max_model_len = config.rollout.max_model_len
    order = TaskOrder.from_config(config, tasks)
    model_config = AutoConfig.from_pretrained(model)
    return TrinityRunFacts(
        mode=mode,
        device=training_backend.device,
        model_path=model,
        checkpoint_root_dir=preflight_context.folder.absolute() / _STATE_DIR,
        total_steps=order.total_steps(common.total_epochs, common.total_training_steps) if mode == "both" else 1,
        namespace=namespace,
        max_model_len=min(max_model_len, context_length(model_config) or max_model_len),
        tinker_base_url=training_backend.tinker_url,
        takes_policy=training_backend.takes_policy,
        heads=getattr(model_config.get_text_config(), "num_attention_heads", 0),
        runners=runners_per_engine(config, engine_count(config, uses_tinker=training_backend.tinker_url is not None)),
        validates=bool(tasks.validation),
        origins=preflight_context.origins,
    )


def _resolved_model_path(model: str) -> str:
    """Return the absolute path of a model's folder; return a Hugging Face name unchanged.

    Trinity's processes have other working directories, so a relative path would not work there.
    """
    return str(Path(model).resolve()) if Path(model).exists() else model
