"""Launching: from a configuration to a finished run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from loguru import logger

from astuner.backbone.base import Backbone, RunContext, load_backbone
from astuner.backbone.progress import RunProgress
from astuner.config.dumping import to_yaml
from astuner.config.loading import load_config, resolve_names
from astuner.config.root import RunConfig
from astuner.launcher.console import log_to, make_console, print_summary
from astuner.run_record import RunRecord, RunSummary
from astuner.schema import Episode

Result = TypeVar("Result")

DEFAULT_EXP_DIR = "launcher_record"


@dataclass(frozen=True)
class Launch:
    """A configuration that is ready to run.

    Attributes:
        config: resolved, names included.
        config_dir: against which relative paths resolve after the working directory.
    """

    config: RunConfig
    config_dir: Path

    @staticmethod
    def from_yaml(
        path: Path, overrides: Sequence[str] = (), backbone: str | None = None, exp_dir: str = DEFAULT_EXP_DIR
    ) -> Launch:
        """Load a YAML file; what it says in older words is logged.

        Raises:
            ConfigError: the file, a key or an override is wrong.
        """
        log_to(make_console())
        loaded = load_config(path, overrides, backbone)
        for notice in loaded.notices:
            logger.warning("{}", notice)
        return Launch(resolve_names(loaded.config, path, exp_dir), path.absolute().parent)

    def train(self) -> RunSummary:
        """Tune the model."""
        return self._run("", lambda backbone, context: backbone.train(context), resume=True)

    def evaluate(self, model: str | None, tasks: int | None) -> RunSummary:
        """Validate `model`, or the configured one, in a record of its own (`{experiment}-eval`)."""
        return self._run("-eval", lambda backbone, context: backbone.evaluate(context, model, tasks), resume=False)

    def dry_run(self) -> list[Episode]:
        """Roll out a few training episodes, in a record of their own (`{experiment}-check`)."""
        return self._run("-check", lambda backbone, context: backbone.dry_run(context), resume=False)

    def _run(self, suffix: str, run: Callable[[Backbone, RunContext], Result], *, resume: bool) -> Result:
        config = self.config.astuner
        backbone = load_backbone(config.backbone)
        folder = Path(config.experiment_dir + suffix)
        console = make_console()
        log_to(console)
        config_yaml = to_yaml(self.config)
        with RunRecord.open(
            folder,
            backbone=config.backbone,
            config_yaml=config_yaml,
            resume=resume and config.trainer_common.resume and _can_go_on(folder, config_yaml),
            loggers=config.trainer_common.logger,
            project=config.project_name,
        ) as record:
            started = psutil.Process().create_time()
            context = RunContext(self.config, self.config_dir, record, RunProgress(console), started)
            result = run(backbone, context)
            if isinstance(result, RunSummary):
                print_summary(console, result, record.folder)
            return result


def _can_go_on(folder: Path, config_yaml: str) -> bool:
    """Whether an earlier run of the same configuration stopped there before its end, with a checkpoint."""
    stopped = any(folder.glob("checkpoints/step_*")) and not (folder / "summary.json").exists()
    if not stopped:
        return False
    same = (folder / "config.yaml").exists() and (folder / "config.yaml").read_text() == config_yaml
    if not same:
        logger.warning("{} holds an unfinished run of another configuration; starting anew", folder)
    return same
