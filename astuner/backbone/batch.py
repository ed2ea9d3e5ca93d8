"""Running a batch of episodes behind a progress bar."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from astuner.backbone.base import RunContext
from astuner.backbone.ingredients import call_settings
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, OnEpisode, Split
from astuner.task_rollout.statistics import tokens_of


class EpisodeRunner(Protocol):
    """Runs batches of episodes: in this process (`TaskRollout`), or in others."""

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Return the episodes, by task and then repeat; failed ones are among them, with their reason.

        Args:
            request: which episodes to run.
            on_episode: called in this thread with each finished episode.
            on_attempt: called here with each of them too, and with each failed attempt that is run again.
        """
        ...


@dataclass(frozen=True)
class Batch:
    """Episodes that were run.

    Attributes:
        episodes: as `TaskRollout.run` gives them.
        first_reward_seconds: from the start of the process to the first reward among them; None where there was none.
    """

    episodes: list[Episode]
    first_reward_seconds: float | None


def run_batch(
    context: RunContext,
    rollout: EpisodeRunner,
    request: BatchRequest,
    name: str,
    on_attempt: OnEpisode = lambda _: None,
) -> Batch:
    """Run the episodes of `request` behind a bar named `name`, which shows their mean reward."""
    rewards: list[float] = []
    first: float | None = None
    with (
        context.phase("validation" if request.split == "val" else "rollout"),
        context.progress.phase(name, len(request.tasks) * request.repeats) as phase,
    ):

        def finished(episode: Episode) -> None:
            nonlocal first
            if episode.reward is not None:
                rewards.append(episode.reward)
                first = time.time() - context.started if first is None else first
            phase.advance(f"reward {sum(rewards) / len(rewards):.2f}" if rewards else "")

        return Batch(rollout.run(request, finished, on_attempt), first)


def dry_run(context: RunContext, rollout: EpisodeRunner, split: Split, seed: int) -> Batch:
    """Run the episodes of the first `debug.debug_first_n_tasks` tasks, as a step or a validation would.

    Each is recorded as soon as it has ended: the page follows, and an interrupted run keeps what it has.
    """
    config, tasks = context.config.astuner, context.ingredients.tasks
    validation = split == "val"
    step = 0 if validation else 1
    request = BatchRequest(
        tasks=(tasks.validation if validation else tasks.training)[: config.debug.debug_first_n_tasks],
        repeats=config.rollout.val_kwargs.num_repeat if validation else config.rollout.num_repeat,
        split=split,
        step=step,
        seed=seed,
        settings=call_settings(config, validation=validation),
    )

    def keep(episode: Episode) -> None:
        context.record.write_episode(step, split, episode, tokens=tokens_of([episode]))
        context.on_episode(episode)

    return run_batch(context, rollout, request, "dry run", keep)
