"""Launching a run: checks, services, run record and backbone."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil
from loguru import logger

from astuner.backbone.base import (
    Backbone,
    PreflightContext,
    RunContext,
    TrainingBackbone,
    is_own_ray,
    load_backbone,
    load_training_backbone,
)
from astuner.backbone.episode_workers.rollout import with_episodes
from astuner.backbone.training.episode_placement import runs_inline
from astuner.backbone.training.progress import RunProgress, warn_if_slow
from astuner.backbone.training.run_inputs import RunInputs, check_references, context_notice, load_run_inputs
from astuner.config.keys import KeyPath
from astuner.config.loading import LoadedConfig, resolve_names, with_values
from astuner.config.root import RunConfig
from astuner.config.section import RAY
from astuner.config.yaml_file import to_yaml
from astuner.debugging.breakpoints import describe_missed_tags, set_debugger_port
from astuner.debugging.tracebacks import format_stack, thread_stack
from astuner.doors import through_door
from astuner.errors import AstunerError, ConfigError
from astuner.launcher.console import (
    add_traceback_note,
    check_rewards,
    filtered_output,
    log_to_console,
    make_console,
    print_episodes,
)
from astuner.launcher.services import Services
from astuner.llm_engine.vllm_server.installation import asks_for_vllm_server, check_engine_packages, installed_vllm
from astuner.run_record.console_lines import FILE_ONLY
from astuner.run_record.folder import FolderLock
from astuner.run_record.loggers import LoggerName, check_loggers
from astuner.run_record.record import RunRecord
from astuner.run_record.summary import RunSummary
from astuner.schema import Episode, Split
from astuner.system.clock import timestamp
from astuner.system.localhost import bypass_proxies
from astuner.system.signals import report_on_usr1
from astuner.task_reader import describe_left_out
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.viewer.transcripts import Shown

Result = TypeVar("Result")
AnyBackbone = TypeVar("AnyBackbone", Backbone, TrainingBackbone)

_CHECK_SUFFIX = "-check"
DEFAULT_EXP_DIR = "launcher_record"


@dataclass(frozen=True)
class Launcher:
    """Runs a resolved configuration.

    Attributes:
        config: the configuration, with all names resolved.
        config_dir: folder of the YAML file. Relative paths are searched in the working directory, then here.
        started: when the run started (for the command, when the process started), as a `timestamp`.
        origins: where the user set each key, for the messages of backbones.
        backbone_reason: why `backbone: auto` stands for the backbone; "" if the configuration names it.
    """

    config: RunConfig
    config_dir: Path
    started: float
    notices: tuple[str, ...] = ()
    services: Services = field(default_factory=Services)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    backbone_reason: str = ""

    @staticmethod
    def from_loaded(loaded: LoadedConfig, exp_dir: str = DEFAULT_EXP_DIR, services: Sequence[str] = ()) -> Launcher:
        """Create a launcher for a loaded YAML file, with the services of the `--with-NAME` options.

        ConfigError: a service does not exist. ServiceError: a built-in service needs a package that is not
        installed.
        """
        config = resolve_names(loaded.config, loaded.path, exp_dir)
        config_dir = loaded.path.absolute().parent
        created = Services.from_names(services, config, config_dir, Path(exp_dir))
        age = max(time.time() - psutil.Process().create_time(), 0.0)
        return Launcher(
            config, config_dir, timestamp() - age, loaded.notices, created, loaded.origins, loaded.backbone.reason
        )

    def log_notices(self) -> None:
        """Log the notices to the console, and that the backbone is loaded next, which takes seconds."""
        log_to_console(make_console())
        self._log_backbone(logger.info)
        for notice in self.notices:
            logger.warning("{}", notice)
        logger.info("loading the backbone {}", self.config.astuner.backbone)

    def _log_backbone(self, log: Callable[..., None]) -> None:
        if self.backbone_reason:
            log("backbone auto is {}: {}", self.config.astuner.backbone, self.backbone_reason)

    def train(self) -> RunSummary:
        """Train the model with the configured backbone, and return the summary of the run."""
        self.log_notices()

        def train(backbone: TrainingBackbone, context: RunContext) -> RunSummary:
            return backbone.train(context)

        return self._run("", load_training_backbone, self.load_inputs, train, is_training=True)

    def evaluate(self, model: str | None, tasks: int | None) -> RunSummary:
        """Validate a model; the record is `{experiment}-eval`.

        Args:
            model: the model; None for the configured one.
            tasks: number of validation tasks, from the first; None for all.

        Raises:
            ConfigError: there are no validation tasks, or there is no agent.
        """
        self.log_notices()
        if self.config.astuner.is_supervised:
            raise ConfigError(
                "`astuner eval` measures an agent, but algorithm sft has none; its loss on the validation transcripts "
                "is in metrics.jsonl (val/loss). Pass the configuration of an agent, and the model with --model"
            )

        def evaluate(backbone: TrainingBackbone, context: RunContext) -> RunSummary:
            return backbone.evaluate(context)

        # The record's config.yaml has the model that is evaluated.
        launcher = replace(self, config=with_values(self.config, {"astuner.model.path": model})) if model else self
        return launcher._run(
            "-eval",
            load_training_backbone,
            lambda: _only_validation(self.load_inputs(model), tasks),
            evaluate,
            model=model,
        )

    def dry_run(self, run_inputs: RunInputs) -> list[Episode]:
        """Roll out a few training episodes; the record is `{experiment}-check`."""
        return self._run(
            _CHECK_SUFFIX,
            load_backbone,
            lambda: run_inputs,
            lambda backbone, context: backbone.dry_run(context, "train"),
        )

    def debug(self, split: Split, *, keep_engine: bool = False, shown: Shown | None = None) -> list[Episode]:
        """Roll out a few episodes and print them; the record is `{experiment}-debug`.

        Args:
            keep_engine: keep the vLLM server running for later runs.
            shown: the transcripts that are printed; None for the default number.

        Raises:
            ConfigError: there is no agent, no task, or no server to keep.
            BackboneError: no episode has a reward, or vLLM is not installed and its server is to be kept.
        """
        self.log_notices()
        if self.config.astuner.is_supervised:
            raise ConfigError(
                "--backbone=debug rolls out an agent, but algorithm sft has none; override it with "
                "astuner.trainer_common.algorithm.adv_estimator=grpo, or inspect the data with `astuner check`"
            )
        if keep_engine and asks_for_vllm_server(self.config.astuner):
            installed_vllm()
        elif keep_engine:
            raise ConfigError(
                "--keep-engine needs a vLLM server that astuner starts: --backbone=debug with rollout.name: vllm and "
                "without debug.base_url; set these, or remove --keep-engine"
            )

        def load_inputs() -> RunInputs:
            run_inputs = self.load_inputs()
            return _only_validation(run_inputs, None) if split == "val" else run_inputs

        def roll_out(backbone: Backbone, context: RunContext) -> list[Episode]:
            ended: list[Episode] = []
            context = replace(context, keep_engine=keep_engine, on_episode=ended.append)
            try:
                episodes = backbone.dry_run(context, split)
            except KeyboardInterrupt:
                if ended:
                    print_episodes(context, ended, "episodes that ended before the interrupt", split, shown)
                raise
            print_episodes(context, episodes, "episodes", split, shown)
            check_rewards(episodes)
            return episodes

        return self._run("-debug", load_backbone, load_inputs, roll_out)

    def load_inputs(self, model: str | None = None) -> RunInputs:
        """Load the inputs of the run; `model` replaces the configured one. AstunerError: one cannot be loaded."""
        return load_run_inputs(self.config.astuner, self.config_dir, model, self.services.env_service)

    def _run(
        self,
        suffix: str,
        load: Callable[[str], AnyBackbone],
        load_inputs: Callable[[], RunInputs],
        run: Callable[[AnyBackbone, RunContext], Result],
        *,
        is_training: bool = False,
        model: str | None = None,
    ) -> Result:
        """Run a backbone in a new run record.

        Args:
            suffix: of the record's folder.
            is_training: whether weights are trained; such a run may resume an earlier one.
            model: the model of the option --model; None without it.
        """
        prepare_process()
        config = self.config.astuner
        log_to_console(console := make_console())
        if config.backbone != "debug":
            set_debugger_port(config.debug.debugger_port)
        folder = Path(config.experiment_dir + suffix)
        active = ActiveEpisodes()
        check_references(config, self.config_dir, self.origins, model)  # before transformers is imported
        with filtered_output(), report_on_usr1(lambda: _log_state(active)), contextlib.ExitStack() as stack:
            # All checks come before an earlier record is moved aside, the fast ones first.
            with _gc_paused():
                check_loggers(self.loggers)
                backbone = load(config.backbone)
                check_engine_packages(config)
                FolderLock(folder).release()
                backbone.check_config(self.config, self.origins, self.services.ray, trains=is_training)
                run_inputs = self.start_services_and_load(load_inputs, active, stack)
                backbone.preflight(
                    PreflightContext(
                        self.config, run_inputs, folder, self.origins, self.services.ray, trains=is_training
                    )
                )
                self.services.start_ray()
            record = stack.enter_context(self._open_record(folder, may_resume=is_training))
            stack.enter_context(self.services.recorded_in(record.folder))
            stack.enter_context(_failures_logged(record))
            self._record_inputs(run_inputs, record.folder)
            progress = RunProgress(console, shown=not runs_inline(config))
            ray = self.services.ray
            monitor = run_inputs.monitor(config, record.write_finding, trains=is_training or suffix == _CHECK_SUFFIX)
            monitor.check_start()
            context = RunContext(
                self.config, run_inputs, record, progress, self.started, active, monitor, origins=self.origins, ray=ray
            )
            result = run(backbone, context)
            if (missed := describe_missed_tags()) is not None:
                logger.warning("{}", missed)
            if isinstance(result, RunSummary):
                through_door("record", "result")(console, result, record.folder)
            return result

    def start_services_and_load(
        self, load_inputs: Callable[[], RunInputs], active: ActiveEpisodes, stack: contextlib.ExitStack
    ) -> RunInputs:
        """Start the services, then load the inputs, because tasks may come from one, then start the workers.

        The services and the workers run until `stack` closes.
        """
        config = self.config.astuner
        stack.enter_context(self.services.running())
        is_ray_backbone = config.backbone in RAY
        if is_ray_backbone and is_own_ray(config.trainer_common.ray_address, self.services.ray):
            # Before the user's code is imported, because importing ray reads the environment.
            stack.enter_context(through_door("ray", "on_loopback")())
        logger.info("reading the tasks and the model's tokenizer")
        with warn_if_slow("read_tasks", config.deadlines, active):
            run_inputs = load_inputs()
        logger.info("loading the agent")
        return stack.enter_context(with_episodes(config, run_inputs))

    def _record_inputs(self, run_inputs: RunInputs, folder: Path) -> None:
        """Write the learned rubrics to the record's folder, and the notices about the inputs to run.log.

        The notices were printed before the record was open, except the one about the model's context.
        """
        if run_inputs.rubrics is not None:
            run_inputs.rubrics.save(folder / "rubrics.yaml")
        to_file = logger.bind(**FILE_ONLY)
        self._log_backbone(to_file.info)
        for notice in self.notices:
            to_file.warning("{}", notice)
        if run_inputs.tasks.skipped_rows:
            to_file.warning("skipped {} invalid rows of the tasks", run_inputs.tasks.skipped_rows)
        if run_inputs.tasks.left_out:
            to_file.info("filters left out {}", describe_left_out(run_inputs.tasks.left_out))
        if (limit := context_notice(self.config.astuner, run_inputs)) is not None:
            logger.info("{}", limit)

    @property
    def loggers(self) -> Sequence[LoggerName]:
        """The experiment trackers of the run; none on debug."""
        config = self.config.astuner
        return () if config.backbone == "debug" else config.trainer_common.logger

    def _open_record(self, folder: Path, *, may_resume: bool) -> RunRecord:
        config = self.config.astuner
        config_yaml = to_yaml(self.config, redacted=True)
        resume = False
        if may_resume and config.trainer_common.resume:
            from astuner.launcher.resume import can_resume

            resume = can_resume(folder, config_yaml, self.config_dir)
        return RunRecord.open(
            folder,
            backbone=config.backbone,
            config_yaml=config_yaml,
            resume=resume,
            loggers=self.loggers,
            project=config.project_name,
            config_dir=self.config_dir,
        )


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector during imports, and exempt the imported objects from it afterwards."""
    # PyTorch, transformers and agent frameworks create half a million objects that are never freed. Scanning them
    # repeatedly takes a fifth of the startup time, and half a second for each collection after that.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def prepare_process() -> None:
    """Prepare what the processes of a run inherit. ConfigError: Python has removed the docstrings."""
    if sys.flags.optimize > 1:
        raise ConfigError("python runs with -OO, but Transformers reads docstrings; use -O, or no PYTHONOPTIMIZE=2")
    bypass_proxies(os.environ)


def _log_state(active: ActiveEpisodes) -> None:
    stack = format_stack(thread_stack(threading.main_thread()))
    logger.info("state of the process:\nthe main thread is at\n{}\n{}", stack, active.report())


@contextlib.contextmanager
def _failures_logged(record: RunRecord) -> Iterator[None]:
    """Log to run.log what ends the run; note in an unexpected error that its traceback is there."""
    to_file = logger.bind(**FILE_ONLY)
    try:
        yield
    except KeyboardInterrupt:
        to_file.warning("interrupted")
        raise
    except AstunerError as error:
        to_file.error("{}", error)
        to_file.opt(exception=True).debug("traceback of the error:")
        raise
    except Exception as error:
        to_file.opt(exception=True).critical("internal error")
        add_traceback_note(error, record.folder / "run.log")
        raise


def _only_validation(run_inputs: RunInputs, limit: int | None) -> RunInputs:
    """Return the inputs with the first `limit` validation tasks."""
    tasks = run_inputs.tasks
    if not tasks.validation:
        raise ConfigError("there are no validation tasks; name them under astuner.task_reader")
    if limit is not None and limit > len(tasks.validation):
        logger.warning(
            "--tasks is {}, but the number of validation tasks is {}; all are used",
            limit,
            len(tasks.validation),
        )
    return replace(run_inputs, tasks=replace(tasks, validation=tasks.validation[:limit]))
