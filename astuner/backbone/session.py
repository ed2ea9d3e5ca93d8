"""What training and evaluation have in common on every backbone: running batches of episodes, and validating."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.backbone.base import RunContext
from astuner.backbone.batch import Batch
from astuner.backbone.ingredients import Ingredients, call_settings, validation_repeats
from astuner.backbone.interrupt import interrupt_deferred
from astuner.backbone.progress_state import RunState, validation_entry
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.schema import Episode, Task
from astuner.task_rollout import BatchRequest, Split
from astuner.task_rollout.statistics import ValidationResult, tokens_of, validate


@dataclass
class Session(ABC):
    """A model, and an engine that samples from it.

    Attributes:
        context: the run.
        state: counters.
    """

    context: RunContext
    state: RunState

    @abstractmethod
    def roll_out(self, request: BatchRequest, name: str) -> Batch:
        """Run the episodes of `request` behind a progress bar named `name`.

        Raises:
            ModelError: the engine broke, which looks like failed episodes to the workflow.
        """

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, adapters merged in."""

    @property
    def config(self) -> AstunerConfig:
        """Section `astuner`."""
        return self.context.config.astuner

    @property
    def ingredients(self) -> Ingredients:
        """What the user brought."""
        return self.context.ingredients

    def run_batch(self, tasks: Sequence[Task], repeats: int, split: Split, name: str) -> list[Episode]:
        """Run `repeats` episodes of each task behind a progress bar named `name`."""
        request = BatchRequest(
            tasks=tasks,
            repeats=repeats,
            split=split,
            step=self.state.step + (split == "train"),
            seed=self.config.trainer_common.seed,
            settings=call_settings(self.config, validation=split == "val"),
        )
        batch = self.roll_out(request, name)
        if self.state.first_reward_seconds is None:
            self.state.first_reward_seconds = batch.first_reward_seconds
        return batch.episodes

    def validate(self, name: str) -> None:
        """Measure the policy on the validation tasks, where there are any; record it and note it in the state.

        Raises:
            BackboneError: no episode of the run could be scored until now.
        """
        tasks = self.ingredients.tasks.validation
        if not tasks:
            return
        began = time.time()
        episodes = self.run_batch(tasks, validation_repeats(self.config), "val", name)
        result = validate(episodes, self.config.trainer_common.val_pass_n)
        with interrupt_deferred():
            for episode in episodes:
                self.context.record.write_episode(self.state.step, "val", episode, tokens=tokens_of([episode]))
            if self.state.totals.ok == 0:
                refuse_all_failed(episodes)
            self.context.record.log_metrics(self.state.step, _metrics(result, time.time() - began))
            self.state.latest = validation_entry(result)
            self.state.validated = self.state.step


def _metrics(result: ValidationResult, seconds: float) -> dict[str, float]:
    metrics = {
        "val/reward": result.reward,
        "val/success_rate": result.success_rate,
        "val/episodes": result.episodes,
        "val/lost": result.lost,
        "time/validation": seconds,
    }
    return metrics | {f"val/pass@{k}": value for k, value in result.pass_at_k.items()}


def refuse_all_failed(episodes: Sequence[Episode]) -> None:
    """Stop a run whose every episode failed: a bug in workflow, judge or data, which more steps cannot mend.

    Raises:
        BackboneError: with the first episode's reason.
    """
    if not any(episode.status == "ok" for episode in episodes):
        raise BackboneError(
            f"all {len(episodes)} episodes failed, so there is nothing to learn from. The first: "
            f"[{episodes[0].error_kind}] {episodes[0].error}"
        )
