"""Trinity's explorer and trainer with astuner's desk: what training and evaluation work with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger

from astuner.backbone.base import Prospect, RunContext
from astuner.backbone.batch import Batch, run_batch
from astuner.backbone.cluster.environment import OWN_ENVIRONMENT, environment_set
from astuner.backbone.cluster.head import is_own_ray
from astuner.backbone.cluster.joining import refuse_missing_ray
from astuner.backbone.episode_worker import AgentJob
from astuner.backbone.progress_state import RunState
from astuner.backbone.session import Session
from astuner.backbone.task_order import TaskOrder
from astuner.backbone.trinity.checkpoint import TrinityCheckpoints, TrinityState
from astuner.backbone.trinity.composition import given_service
from astuner.backbone.trinity.plan import Mode, TrinityPlan
from astuner.backbone.trinity.rules import runner_count
from astuner.backbone.trinity.sides import Side, TinkerSide, VerlSide
from astuner.backbone.trinity.tinker_process import KEY, tinker_server
from astuner.backbone.trinity.tinker_service import TinkerService, service_key
from astuner.backbone.trinity.unfit import FEWEST_GPUS
from astuner.breakpoints import chosen
from astuner.config.root import AstunerConfig, RunConfig
from astuner.errors import BackboneError
from astuner.loopback import ADDRESS
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, OnEpisode

if TYPE_CHECKING:
    from astuner.backbone.trinity.desk import Course, DeskJob
    from astuner.backbone.trinity.following import Following
    from astuner.backbone.trinity.stage import Stage

STATE_FOLDER, SERVICE_FOLDER = "trinity", "tinker"
"""In the record: what Trinity keeps of the run, and what the Tinker server does."""


@dataclass
class TrinitySession(Session):
    """Trinity's two roles, and what the launcher knows of them.

    Attributes:
        context: the run.
        state: counters.
        stage: the roles.
        following: reads their news.
        plan: facts of the run.
        side: what trains and samples.
        trinity_state: what Trinity keeps on disk.
    """

    stage: Stage
    following: Following
    plan: TrinityPlan
    side: Side
    trinity_state: TrinityState

    @property
    def updates(self) -> int:
        """Steps of Trinity's trainer in a training step."""
        return self.config.trainer_common.mini_batch_num

    @property
    def begun(self) -> bool:
        """Whether explorer and trainer work."""
        return self.following.last > 0

    def roll_out(self, request: BatchRequest, name: str) -> Batch:
        """Wait for a training step's episodes, which the explorer runs by itself, or have it run a validation's."""
        if request.split == "train":
            return run_batch(self.context, self.following, request, name)
        if self.begun:
            with self.context.phase("sync_weights"):
                self._hand_over_weights()
        return run_batch(self.context, AskedFor(self), request, name)

    def _hand_over_weights(self) -> None:
        """Have the explorer, which waits, take the weights as they are after `state.step` steps."""
        deadlines = self.config.deadlines
        number = self.state.step * self.updates
        if number == self.following.last:
            self.stage.steps_done(deadlines.save_checkpoint)
            self.stage.sync(deadlines.sync_weights)
        elif self.config.asynchrony.sync_style == "trainer_driven":
            self.stage.wait_for_weights(number, deadlines.sync_weights)
        else:
            self.stage.take_weights(deadlines.sync_weights)

    def begin(self, course: Course) -> None:
        """Let explorer and trainer work."""
        self.following.last = course.last * self.updates
        self.following.trained = course.done * self.updates
        _ask(self.following.desk.begin, course)
        self.stage.begin()

    def go_on(self, step: int) -> None:
        """Let the explorer begin the batches after `step`."""
        _ask(self.following.desk.go_on, step)

    def saved_weights(self) -> str | None:
        """Return where the weights are that the trainer saved after `state.step` steps; None where it did not."""
        if self.begun and self.state.step * self.updates == self.following.last:
            self.stage.steps_done(self.config.deadlines.save_checkpoint)
        return self.trinity_state.saved(self.state.step * self.updates)

    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, adapters merged in.

        Where the run ends before its last step, the trainer may have done one more by then.
        """
        weights = self.saved_weights()
        if weights is None:
            self.stage.save(self.config.deadlines.save_checkpoint)
            weights = self.trinity_state.newest()
        self.side.save_model(self.plan.model_path, weights, folder)
        self.ingredients.codec.save(folder)


@dataclass(frozen=True)
class AskedFor:
    """Has the explorer run episodes that nothing is trained of.

    Attributes:
        session: whose explorer.
    """

    session: TrinitySession

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Return the episodes, by task and then repeat; one that was run again is preceded by its attempts."""
        _ask(self.session.following.desk.ask, request)
        self.session.stage.evaluate(self.session.config.deadlines.validation)
        return self.session.following.run(request, on_episode, on_attempt)


def _ask(method: Any, argument: object) -> None:
    import ray
    from ray.exceptions import RayError

    from astuner.backbone.trinity.following import gone

    try:
        ray.get(method.remote(argument))
    except RayError as error:
        raise BackboneError(gone(error)) from error


def refuse_unfit(prospect: Prospect) -> None:
    """Find out without starting anything what would end a run of this configuration.

    Raises:
        AstunerError: what, and what to do.
    """
    config = prospect.config.astuner
    address = config.trainer_common.ray_address
    # A server of the run's own has no port yet.
    side = _known_side(prospect.config) or TinkerSide(TinkerService(f"http://{ADDRESS}", KEY))
    with _environment_prepared(is_own_ray(address, prospect.ray), side):
        side.before_import()
        from astuner.backbone.trinity.checked import filled_in

        filled_in(prospect.config, _plan(prospect, "both" if prospect.trains else "bench", side, "astuner"))
        refuse_missing_ray(address)


@contextlib.contextmanager
def trinity_session(
    context: RunContext, mode: Mode, checkpoints: TrinityCheckpoints | None = None
) -> Iterator[TrinitySession]:
    """Start the Tinker server, where there is to be one, Ray, and Trinity's roles; end all that was started afterwards.

    Args:
        context: the run.
        mode: both trains, bench only samples.
        checkpoints: to go on from.

    Raises:
        AstunerError: the configuration does not fit, or something does not start.
    """
    config, record = context.config.astuner, context.record.folder.absolute()
    path = _path(context.ingredients.model_path)
    with contextlib.ExitStack() as stack:
        side = _known_side(context.config) or _with_a_server(context, path, stack)
        environment = stack.enter_context(_environment_prepared(context.has_own_ray, side))
        state = TrinityState(record / STATE_FOLDER, side)
        state.clear()
        found = checkpoints.newest() if checkpoints else None
        if found:
            state.restore(found, config.trainer_common.mini_batch_num)
        with context.phase("load_model"):
            session = _started(context, mode, path, side, state, environment, stack)
        yield session


def _environment_prepared(own_ray: bool, side: Side) -> contextlib.AbstractContextManager[dict[str, str]]:
    """Set what Ray and Trinity read when they are imported, for the block; give it for their processes."""
    return environment_set({**(OWN_ENVIRONMENT if own_ray else {}), **_ENVIRONMENT, **side.environment})


def _known_side(config: RunConfig) -> Side | None:
    """Return the side of the service that the `trinity:` section names, or of GPUs; None for a server of the run's own.

    Raises:
        ConfigError: there is no key for the service.
    """
    url = given_service(config)
    if url is not None:
        return TinkerSide(TinkerService(url, service_key()))
    return VerlSide() if on_gpus(config.astuner) else None


def on_gpus(config: AstunerConfig) -> bool:
    """Return whether vLLM samples and verl's workers train: on `auto`, where there are GPUs enough for both."""
    wanted = config.trainer_common.device
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.device_count() >= FEWEST_GPUS)


def _with_a_server(context: RunContext, model: str, stack: contextlib.ExitStack) -> Side:
    folder = context.record.folder.absolute() / SERVICE_FOLDER
    return TinkerSide(stack.enter_context(tinker_server(model, context.config.astuner.model.dtype, folder)))


_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TINKER_TELEMETRY": "0",
    # Trinity's own loads every plugin of vLLM's that is installed.
    "VLLM_PLUGINS": "none",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # In the launcher; what Trinity's processes write to its log files is for Trinity's configuration to say.
    "TRINITY_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def _started(
    context: RunContext,
    mode: Mode,
    model: str,
    side: Side,
    state: TrinityState,
    environment: dict[str, str],
    stack: contextlib.ExitStack,
) -> TrinitySession:
    side.before_import()
    from astuner.backbone.cluster.connection import ray_connected, refuse_connected
    from astuner.backbone.trinity.checked import checked, filled_in

    config = context.config.astuner
    refuse_connected()
    logger.info("starting Ray and Trinity's explorer and trainer; that takes up to a minute")
    namespace = f"astuner-{context.record.folder.name}-{os.getpid()}"
    patience = config.deadlines.load_model
    plan = _plan(context.prospect, mode, side, namespace)
    filled = filled_in(context.config, plan)
    settings = {
        "address": context.ray.address if context.ray else config.trainer_common.ray_address,
        "namespace": namespace,
        "runtime_env": {**side.for_ray, "env_vars": {**environment, **_paths(side), **filled.get_envs()}},
    }
    stack.enter_context(ray_connected(settings))
    from astuner.backbone.trinity.desk import open_desk
    from astuner.backbone.trinity.following import Following
    from astuner.backbone.trinity.stage import stage

    job = _job(context, plan)
    desk = open_desk(job)
    side.wait_until_served(patience or 3600.0)
    running = stack.enter_context(stage(checked(filled), side.trainer_class(), side.refuse_ended))
    following = Following(config, desk, running)
    running.prepare(patience)
    return TrinitySession(context, RunState(), running, following, plan, side, state)


def _paths(side: Side) -> dict[str, str]:
    """Return where the run's processes find packages."""
    import astuner

    package = str(Path(astuner.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (*side.packages, package, os.environ.get("PYTHONPATH"))))}


def _path(model: str) -> str:
    """Return the model's folder as processes with other working directories find it, or its name."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _plan(prospect: Prospect, mode: Mode, side: Side, namespace: str) -> TrinityPlan:
    config, common = prospect.config.astuner, prospect.config.astuner.trainer_common
    model = _path(prospect.ingredients.model_path)
    order = TaskOrder(prospect.ingredients.tasks.training, config.data.train_batch_size, None)
    return TrinityPlan(
        mode=mode,
        device=side.device,
        model_path=model,
        checkpoint_root_dir=prospect.folder.absolute() / STATE_FOLDER,
        total_steps=order.total_steps(common.total_epochs, common.total_training_steps) if mode == "both" else 1,
        namespace=namespace,
        max_model_len=_max_model_len(config.rollout.max_model_len, model),
        tinker_base_url=side.service,
        runners=runner_count(config),
        validates=bool(prospect.ingredients.tasks.validation),
        origins=prospect.origins,
    )


def _max_model_len(wanted: int, model: str) -> int:
    from transformers import AutoConfig

    positions = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    return min(wanted, positions) if isinstance(positions, int) else wanted


def _job(context: RunContext, plan: TrinityPlan) -> DeskJob:
    from astuner.backbone.trinity.desk import DeskJob

    config = context.config.astuner
    agent = AgentJob(config, context.ingredients.search, Path.cwd(), plan.model_path, chosen())
    return DeskJob(
        agent=agent,
        tinker=plan.uses_tinker,
        max_model_len=plan.max_model_len,
        updates=config.trainer_common.mini_batch_num,
        runners=plan.runners,
    )
