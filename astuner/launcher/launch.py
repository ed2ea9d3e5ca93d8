"""Launching: from a configuration to a finished run."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil
from loguru import logger
from rich.markup import escape

from astuner.backbone.base import (
    Backbone,
    Prospect,
    RunContext,
    TrainingBackbone,
    check_engine,
    collector_at_rest,
    load_backbone,
    load_training_backbone,
)
from astuner.backbone.cluster.environment import ON_LOOPBACK, environment_set
from astuner.backbone.cluster.head import is_own_ray
from astuner.backbone.ingredients import Ingredients, gather, one_at_a_time
from astuner.backbone.phases import watched
from astuner.backbone.progress import RunProgress
from astuner.breakpoints import stop_through_port, why_nothing_stopped
from astuner.config.dumping import to_yaml
from astuner.config.keys import KeyPath
from astuner.config.loading import LoadedConfig, resolve_names
from astuner.config.root import RunConfig, starts_vllm
from astuner.errors import AstunerError, ConfigError
from astuner.launcher.console import log_to, make_console, note_traceback, print_summary
from astuner.launcher.episode_table import (
    episode_table,
    failure_lines,
    refuse_unrewarded,
    training_lines,
    why_nothing_trains,
)
from astuner.launcher.output import FILE_ONLY, tidy_output
from astuner.launcher.services import Services
from astuner.run_record import FolderLock, LoggerName, RunRecord, RunSummary, check_loggers, redact
from astuner.schema import Episode
from astuner.signals import report_on_usr1
from astuner.stacks import shown, thread_stack
from astuner.task_rollout import RunningEpisodes, Split

Result = TypeVar("Result")
AnyBackbone = TypeVar("AnyBackbone", Backbone, TrainingBackbone)

DEFAULT_EXP_DIR = "launcher_record"


@dataclass(frozen=True)
class Launch:
    """A configuration that is ready to run.

    Attributes:
        config: resolved, names included.
        config_dir: against which relative paths resolve after the working directory.
        started: when the run began, seconds since the epoch: with the process, for the command.
        notices: what is to be said about the configuration.
        services: what runs beside it.
        origins: where the user set a key, for what only the backbone can judge.
    """

    config: RunConfig
    config_dir: Path
    started: float
    notices: tuple[str, ...] = ()
    services: Services = field(default_factory=Services)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)

    @staticmethod
    def of_loaded(loaded: LoadedConfig, exp_dir: str = DEFAULT_EXP_DIR, services: Sequence[str] = ()) -> Launch:
        """Make a launch of a YAML file that is loaded, and find the services that `--with-NAME` asks for.

        Raises:
            ConfigError: there is no such service.
            ServiceError: a built-in service needs a package that is not installed.
        """
        started = psutil.Process().create_time()
        config = resolve_names(loaded.config, loaded.path, exp_dir)
        config_dir = loaded.path.absolute().parent
        wanted = Services.named(services, config, config_dir, Path(exp_dir))
        return Launch(config, config_dir, started, loaded.notices, wanted, loaded.origins)

    def announce(self) -> None:
        """Say the notices on the console."""
        log_to(make_console())
        for notice in self.notices:
            logger.warning("{}", notice)

    def train(self) -> RunSummary:
        """Tune the model."""
        self.announce()

        def tune(backbone: TrainingBackbone, context: RunContext) -> RunSummary:
            return backbone.train(context)

        return self._run("", load_training_backbone, self._ingredients, tune, resume=True)

    def evaluate(self, model: str | None, tasks: int | None) -> RunSummary:
        """Validate `model`, or the configured one, in a record of its own (`{experiment}-eval`).

        Args:
            model: measure this one.
            tasks: measure the first so many validation tasks only.

        Raises:
            ConfigError: there are no validation tasks, or no agent.
        """
        self.announce()
        if self.config.astuner.trainer_common.algorithm.adv_estimator == "sft":
            raise ConfigError(
                "`astuner eval` measures an agent, and algorithm sft runs none: its loss on the validation transcripts "
                "is in metrics.jsonl (val/loss). Give the configuration of the agent, and the model with --model"
            )

        def ingredients() -> Ingredients:
            return _first_validation_tasks(gather(self.config.astuner, self.config_dir, model), tasks)

        def measure(backbone: TrainingBackbone, context: RunContext) -> RunSummary:
            return backbone.evaluate(context)

        return self._run("-eval", load_training_backbone, ingredients, measure)

    def dry_run(self, ingredients: Ingredients) -> list[Episode]:
        """Roll out a few training episodes, in a record of their own (`{experiment}-check`)."""

        def roll_out(backbone: Backbone, context: RunContext) -> list[Episode]:
            return backbone.dry_run(context, "train")

        return self._run("-check", load_backbone, lambda: ingredients, roll_out)

    def debug(self, split: Split, *, keep_engine: bool = False) -> list[Episode]:
        """Roll out a few episodes and print what became of them, in a record of their own (`{experiment}-debug`).

        Args:
            split: of the tasks.
            keep_engine: leave the vLLM server that it starts warm for later runs.

        Raises:
            ConfigError: there is no agent to run, or no task, or no server to keep.
            BackboneError: no episode got a reward.
        """
        self.announce()
        if self.config.astuner.trainer_common.algorithm.adv_estimator == "sft":
            raise ConfigError(
                "--backbone=debug rolls out an agent, and algorithm sft runs none: override it with "
                "astuner.trainer_common.algorithm.adv_estimator=grpo, or look at the data with `astuner check`"
            )

        if keep_engine and not starts_vllm(self.config.astuner):
            raise ConfigError(
                "--keep-engine is for a vLLM server that astuner starts: with --backbone=debug, rollout.name: vllm and "
                "no debug.base_url; leave it out, or set those"
            )

        def ingredients() -> Ingredients:
            return _first_validation_tasks(self._ingredients(), None) if split == "val" else self._ingredients()

        def roll_out(backbone: Backbone, context: RunContext) -> list[Episode]:
            ended: list[Episode] = []
            context = replace(context, keep_engine=keep_engine, on_episode=ended.append)
            try:
                episodes = backbone.dry_run(context, split)
            except KeyboardInterrupt:
                if ended:
                    _print_episodes(context, ended, "episodes that had ended", split)
                raise
            _print_episodes(context, episodes, "episodes", split)
            refuse_unrewarded(episodes)
            return episodes

        return self._run("-debug", load_backbone, ingredients, roll_out)

    def _ingredients(self) -> Ingredients:
        return gather(self.config.astuner, self.config_dir)

    def _run(
        self,
        suffix: str,
        load: Callable[[str], AnyBackbone],
        ingredients: Callable[[], Ingredients],
        run: Callable[[AnyBackbone, RunContext], Result],
        *,
        resume: bool = False,
    ) -> Result:
        config = self.config.astuner
        console = make_console()
        log_to(console)
        if config.backbone != "debug":
            stop_through_port(config.debug.debugger_port)
        running = RunningEpisodes()
        with tidy_output(), report_on_usr1(lambda: _report(running)), contextlib.ExitStack() as stack:
            # Mistakes are found before an earlier record is moved aside, and the cheap ones first.
            with collector_at_rest():
                backbone = load(config.backbone)
                check_engine(config)
                folder = Path(config.experiment_dir + suffix)
                check_loggers(self._loggers)
                FolderLock(folder).release()
                # Before the tasks are read: they may come from a service.
                stack.enter_context(self.services.running())
                if config.backbone in ("trinity", "verl") and is_own_ray(
                    config.trainer_common.ray_address, self.services.ray
                ):  # the user's code may import ray, which reads it then
                    stack.enter_context(environment_set(ON_LOOPBACK))
                with watched("read_tasks", config.deadlines, running):
                    brought = ingredients()
                # A run that is refused leaves an earlier record where it is.
                prospect = Prospect(self.config, brought, folder, self.origins, self.services.ray, trains=resume)
                backbone.refuse(prospect)
            record = stack.enter_context(self._record(folder, resume=resume))
            stack.enter_context(self.services.recorded_in(record.folder))
            stack.enter_context(_failure_logged(record))
            self._repeat_notices(brought)
            progress = RunProgress(console, shown=not one_at_a_time(config))
            context = RunContext(
                self.config,
                brought,
                record,
                progress,
                self.started,
                running,
                origins=self.origins,
                ray=self.services.ray,
            )
            result = run(backbone, context)
            if (missed := why_nothing_stopped()) is not None:
                logger.warning("{}", missed)
            if isinstance(result, RunSummary):
                print_summary(console, result, record.folder)
            return result

    def _repeat_notices(self, brought: Ingredients) -> None:
        """Let run.log have what was on the console before there was a file."""
        to_file = logger.bind(**FILE_ONLY)
        for notice in self.notices:
            to_file.warning("{}", notice)
        if brought.tasks.skipped_rows:
            to_file.warning("{} bad rows are left out of the tasks", brought.tasks.skipped_rows)

    @property
    def _loggers(self) -> Sequence[LoggerName]:
        """Where metrics go; debug has none."""
        config = self.config.astuner
        return () if config.backbone == "debug" else config.trainer_common.logger

    def _record(self, folder: Path, *, resume: bool) -> RunRecord:
        config = self.config.astuner
        config_yaml = to_yaml(self.config)
        return RunRecord.open(
            folder,
            backbone=config.backbone,
            config_yaml=config_yaml,
            resume=resume and config.trainer_common.resume and _can_go_on(folder, config_yaml),
            loggers=self._loggers,
            project=config.project_name,
        )


def _print_episodes(context: RunContext, episodes: Sequence[Episode], title: str, split: Split) -> None:
    console = context.progress.console
    console.print(episode_table(title, episodes))
    for line in failure_lines(episodes):
        console.print(escape(redact(line)), style="yellow", soft_wrap=True)
    if split == "train":
        for line in training_lines(episodes):
            console.print(line, soft_wrap=True)
        if (nothing := why_nothing_trains(episodes)) is not None:
            console.print(escape(redact(nothing)), style="yellow", soft_wrap=True)
    folder = str(context.record.folder)
    console.print(escape(f"record: {folder} (as a page: astuner view {shlex.quote(folder)})"), soft_wrap=True)


def _report(running: RunningEpisodes) -> None:
    """Say what the process is at, as SIGUSR1 asks."""
    main = shown(thread_stack(threading.main_thread()))
    logger.info("what this process is at:\nthe main thread, at\n{}\n{}", main, running.report())


@contextlib.contextmanager
def _failure_logged(record: RunRecord) -> Iterator[None]:
    """Let run.log have what ends the run; what is no error of ours is told where its traceback is."""
    to_file = logger.bind(**FILE_ONLY)
    try:
        yield
    except KeyboardInterrupt:
        to_file.warning("interrupted")
        raise
    except AstunerError as error:
        to_file.error("{}", error)
        to_file.opt(exception=True).debug("where it was raised:")
        raise
    except Exception as error:
        to_file.opt(exception=True).critical("internal error")
        note_traceback(error, record.folder / "run.log")
        raise


def _first_validation_tasks(ingredients: Ingredients, wanted: int | None) -> Ingredients:
    tasks = ingredients.tasks
    if not tasks.validation:
        raise ConfigError("there are no validation tasks to measure on; name them under astuner.task_reader")
    if wanted is not None and wanted > len(tasks.validation):
        logger.warning(
            "--tasks {}: there are only {} validation tasks; all are measured", wanted, len(tasks.validation)
        )
    return replace(ingredients, tasks=replace(tasks, validation=tasks.validation[:wanted]))


def _can_go_on(folder: Path, config_yaml: str) -> bool:
    """Whether an earlier run of the same configuration stopped there before its end, with a checkpoint."""
    stopped = any(folder.glob("checkpoints/step_*")) and not (folder / "summary.json").exists()
    if not stopped:
        return False
    same = (folder / "config.yaml").exists() and (folder / "config.yaml").read_text() == redact(config_yaml)
    if not same:
        logger.warning("{} holds an unfinished run of another configuration; starting anew", folder)
    return same
