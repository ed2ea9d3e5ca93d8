"""Launching: from a configuration to a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil
from loguru import logger

from astuner.backbone.base import Backbone, RunContext, load_backbone
from astuner.backbone.ingredients import Ingredients, gather
from astuner.backbone.progress import RunProgress
from astuner.config.dumping import to_yaml
from astuner.config.loading import load_config, resolve_names
from astuner.config.root import RunConfig
from astuner.errors import AstunerError, ConfigError
from astuner.launcher.console import log_to, make_console, note_traceback, print_summary
from astuner.launcher.output import FILE_ONLY, tidy_output
from astuner.launcher.services import Services
from astuner.run_record import FolderLock, RunRecord, RunSummary, check_loggers, redact
from astuner.schema import Episode

Result = TypeVar("Result")

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
    """

    config: RunConfig
    config_dir: Path
    started: float
    notices: tuple[str, ...] = ()
    services: Services = field(default_factory=Services)

    @staticmethod
    def from_yaml(
        path: Path,
        overrides: Sequence[str] = (),
        backbone: str | None = None,
        exp_dir: str = DEFAULT_EXP_DIR,
        services: Sequence[str] = (),
    ) -> Launch:
        """Load a YAML file, and find the services that `--with-NAME` asks for.

        Raises:
            ConfigError: the file, a key or an override is wrong, or there is no such service.
            ServiceError: a built-in service needs a package that is not installed.
        """
        loaded = load_config(path, overrides, backbone)
        started = psutil.Process().create_time()
        config = resolve_names(loaded.config, path, exp_dir)
        config_dir = path.absolute().parent
        wanted = Services.named(services, config, config_dir, Path(exp_dir))
        return Launch(config, config_dir, started, loaded.notices, wanted)

    def announce(self) -> None:
        """Say the notices on the console."""
        log_to(make_console())
        for notice in self.notices:
            logger.warning("{}", notice)

    def train(self) -> RunSummary:
        """Tune the model."""
        self.announce()
        return self._run("", self._ingredients, lambda backbone, context: backbone.train(context), resume=True)

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

        return self._run("-eval", ingredients, lambda backbone, context: backbone.evaluate(context), resume=False)

    def dry_run(self, ingredients: Ingredients) -> list[Episode]:
        """Roll out a few training episodes, in a record of their own (`{experiment}-check`)."""
        return self._run(
            "-check", lambda: ingredients, lambda backbone, context: backbone.dry_run(context), resume=False
        )

    def _ingredients(self) -> Ingredients:
        return gather(self.config.astuner, self.config_dir)

    def _run(
        self,
        suffix: str,
        ingredients: Callable[[], Ingredients],
        run: Callable[[Backbone, RunContext], Result],
        *,
        resume: bool,
    ) -> Result:
        config = self.config.astuner
        console = make_console()
        log_to(console)
        with tidy_output():
            # Mistakes are found before an earlier record is moved aside, and the cheap ones first.
            backbone = load_backbone(config.backbone)
            folder = Path(config.experiment_dir + suffix)
            check_loggers(config.trainer_common.logger)
            FolderLock(folder).release()
            with contextlib.ExitStack() as stack:
                # Before the tasks are read: they may come from a service.
                stack.enter_context(self.services.running())
                brought = ingredients()
                record = stack.enter_context(self._record(folder, resume=resume))
                stack.enter_context(self.services.recorded_in(record.folder))
                stack.enter_context(_failure_logged(record))
                self._repeat_notices(brought)
                result = run(backbone, RunContext(self.config, brought, record, RunProgress(console), self.started))
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

    def _record(self, folder: Path, *, resume: bool) -> RunRecord:
        config = self.config.astuner
        config_yaml = to_yaml(self.config)
        return RunRecord.open(
            folder,
            backbone=config.backbone,
            config_yaml=config_yaml,
            resume=resume and config.trainer_common.resume and _can_go_on(folder, config_yaml),
            loggers=config.trainer_common.logger,
            project=config.project_name,
        )


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
