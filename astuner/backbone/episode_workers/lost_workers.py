"""Runs the remaining episodes of a share again after the process that ran them was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from astuner.backbone.episode_workers.worker import LogRecord, WorkerEvent
from astuner.backbone.ray_cluster.actor_stream import ActorLostError
from astuner.config.root import AstunerConfig
from astuner.errors import first_line
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, failed_episodes

_TRIES_TOGETHER = 2
# Added to the timeouts of an episode before its worker counts as stuck.
_GRACE_SECONDS = 60.0


def longest_wait(config: AstunerConfig) -> float:
    """Return the seconds within which a worker finishes an episode, unless it is stuck."""
    rollout = config.rollout
    return (rollout.episode_timeout + config.task_judge.timeout) * (rollout.max_retries + 1) + _GRACE_SECONDS


def run_share(
    share: BatchRequest, run_on_worker: Callable[[BatchRequest], Iterator[WorkerEvent]]
) -> Iterator[WorkerEvent]:
    """Run a share of a batch and yield its events. Run the remaining episodes again if their worker is lost.

    After two losses, the remaining episodes run one at a time, so that only those that end their worker fail.

    Args:
        share: the episodes.
        run_on_worker: runs episodes on a worker, and yields its events. If the worker is lost, it raises
            ActorLostError; the next call runs on a new worker.
    """
    missing = {(task.task_id, repeat) for task, repeat in share.episodes()}
    reason = ""

    def attempt(episodes: set[tuple[str, int]]) -> Iterator[WorkerEvent]:
        nonlocal reason
        try:
            for event in run_on_worker(replace(share, only=frozenset(episodes))):
                if isinstance(event, Episode):
                    missing.discard((event.task.task_id, event.repeat_index))
                yield event
            reason = "it finished without this episode"
        except ActorLostError as error:
            reason = first_line(error)
            left = len(episodes & missing)
            yield LogRecord(
                "WARNING",
                f"an episode worker was lost in {share.split} step {share.step} ({reason}); {left} of its episodes had "
                "not finished",
            )

    for _ in range(_TRIES_TOGETHER):
        if missing:
            yield from attempt(set(missing))
    for episode in sorted(missing):
        yield from attempt({episode})
        if episode in missing:
            error = f"its worker was lost {_TRIES_TOGETHER + 1} times, the last time with only this episode: {reason}"
            yield from failed_episodes(replace(share, only=frozenset({episode})), "worker", error)
