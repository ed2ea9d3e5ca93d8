"""The local backbone: everything in one process, on a CPU or one GPU."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from astuner.backbone.base import MemoryEstimate, RunContext
from astuner.backbone.ingredients import gather
from astuner.backbone.local.algorithms import resolve
from astuner.backbone.local.checkpoint import Checkpoints
from astuner.backbone.local.estimate import estimate_memory
from astuner.backbone.local.loop import TrainingLoop
from astuner.backbone.local.policy import Policy, choose_device
from astuner.backbone.local.progress_state import RunState, validation_entry
from astuner.backbone.local.reinforce import ReinforcementLoop
from astuner.backbone.local.session import Session
from astuner.backbone.local.supervised import SupervisedLoop
from astuner.config.root import AstunerConfig
from astuner.errors import ConfigError, RecordError
from astuner.run_record import RunSummary, plot_run
from astuner.schema import Episode
from astuner.task_rollout.statistics import tokens_of

NAME = "local"


class LocalBackbone:
    """Trains with PyTorch in this process, sampling from the embedded engine."""

    def train(self, context: RunContext) -> RunSummary:
        """Run the configured algorithm and leave the tuned model in `{record}/model`."""
        common = context.config.astuner.trainer_common
        algorithm = resolve(common.algorithm)
        checkpoints = Checkpoints(context.record.folder / "checkpoints", common.max_checkpoints_to_keep)
        with _session(context) as session:
            kind = SupervisedLoop if algorithm.rule is None else ReinforcementLoop
            loop: TrainingLoop = kind(session, algorithm, checkpoints)
            loop.run()
            folder = _save_model(context.record.folder / "model", session.policy, session.ingredients.tokenizer)
            plot_run(context.record.folder)
            summary = loop.state.summary(backbone=NAME, seed=common.seed, started=context.started, model=str(folder))
            context.record.write_summary(summary)
            return summary

    def evaluate(self, context: RunContext, model: str | None, tasks: int | None) -> RunSummary:
        """Validate once."""
        config = context.config.astuner
        with _session(context, model) as session:
            chosen = session.ingredients.tasks.validation[:tasks]
            if not chosen:
                raise ConfigError("there are no validation tasks to evaluate on; set them in task_reader")
            result = session.validate("validation", chosen)
        session.state.after = validation_entry(result) if result else None
        path = session.ingredients.model_path
        summary = session.state.summary(
            backbone=NAME, seed=config.trainer_common.seed, started=context.started, model=path
        )
        context.record.write_summary(summary)
        return summary

    def dry_run(self, context: RunContext) -> list[Episode]:
        """Roll out a few training tasks."""
        config = context.config.astuner
        with _session(context) as session:
            tasks = session.ingredients.tasks.training[: config.debug.debug_first_n_tasks]
            episodes = session.run_batch(tasks, config.rollout.num_repeat, "train", "dry run")
        for episode in episodes:
            context.record.write_episode(1, "train", episode, tokens=tokens_of([episode]))
        return episodes

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate:
        """Estimate from shapes."""
        return estimate_memory(config, model_path)


@contextlib.contextmanager
def _session(context: RunContext, model: str | None = None) -> Iterator[Session]:
    """Load what a run of episodes needs, and stop it afterwards."""
    config = context.config.astuner
    torch.manual_seed(config.trainer_common.seed)
    ingredients = gather(config, context.config_dir, model)
    policy = Policy(config.model, ingredients.model_path, choose_device(config.trainer_common.device))
    session = Session(context, ingredients, policy, RunState())
    try:
        yield session
    finally:
        session.close()


def _save_model(folder: Path, policy: Policy, tokenizer: object) -> Path:
    partial = folder.with_name(f".partial_{folder.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        policy.save(partial, tokenizer)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise RecordError(f"the tuned model could not be written to {folder}: {error}; free some space") from error
    return folder
