"""The episode workers of a run, over all nodes of its Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from loguru import logger
from ray.exceptions import RayActorError, RayTaskError

from astuner.backbone.verl.episode_worker import EpisodeWorker, WorkerJob
from astuner.errors import AstunerError, BackboneError
from astuner.model_tuner import first_line
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, OnEpisode, lost_episodes, report_failures

_CORES_PER_WORKER = 8
_TRIES = 3
# Beyond what an episode itself may take, before its worker is taken for stuck as a whole.
_GRACE_SECONDS = 60.0


@dataclass
class EpisodeFleet:
    """Runs batches of episodes in Ray actors; in the place of one that dies another is started, for its share.

    Attributes:
        job: what each worker is given.
        policy_version: the weights that the engines have.
    """

    job: WorkerJob
    policy_version: int = 0
    _actors: list[Any] = field(default_factory=list, init=False)
    _shares: list[int] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start the workers.

        Raises:
            AstunerError: one cannot load the agent.
        """
        most = self.job.config.rollout.max_env_worker
        count = min(_wanted_workers(), most)
        self._shares = [most // count + (index < most % count) for index in range(count)]
        self._actors = [self._new_actor(index) for index in range(count)]
        try:
            ray.get([actor.ready.remote() for actor in self._actors])
        except RayTaskError as error:
            raise _as_ours(error, "an episode worker did not start") from error
        except RayActorError as error:
            raise BackboneError(f"an episode worker did not start: {first_line(error)}") from error

    def _new_actor(self, index: int) -> Any:
        config = self.job.config
        own = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"max_env_worker": self._shares[index]})}
        )
        actor = ray.remote(EpisodeWorker).options(num_cpus=1, scheduling_strategy="SPREAD")
        return actor.remote(replace(self.job, config=own))

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Return the episodes, by task and then repeat; an episode that was run again is preceded by its attempts.

        Raises:
            BackboneError: a worker raised, which is a bug of ours.
        """
        arrived: queue.SimpleQueue[_News] = queue.SimpleQueue()
        shares = [request.tasks[index :: len(self._actors)] for index in range(len(self._actors))]
        busy = [(index, replace(request, tasks=tasks)) for index, tasks in enumerate(shares) if tasks]
        for index, share in busy:
            threading.Thread(target=self._follow, args=(index, share, arrived), daemon=True).start()
        found: list[Episode] = []
        told: set[str] = set()
        running = len(busy)
        while running:
            news = arrived.get()
            if news.shown is not None:
                told.add(news.shown.episode_id)
                on_attempt(news.shown)
                on_episode(news.shown)
            if news.error is not None:
                raise news.error
            if news.episodes is not None:
                for attempt in news.episodes:
                    if attempt.episode_id not in told:
                        on_attempt(attempt)
                found += news.episodes
                running -= 1
        ordered = _in_order(found, request)
        last = {(episode.task.task_id, episode.repeat_index): episode for episode in ordered}
        report_failures(list(last.values()), request)
        return ordered

    def close(self) -> None:
        """End the workers, and with them their threads."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()

    def _follow(self, index: int, share: BatchRequest, arrived: queue.SimpleQueue[_News]) -> None:
        """Have one worker run its share, in a thread that waits for it."""
        why = ""
        for attempt in range(1, _TRIES + 1):
            try:
                arrived.put(_News(episodes=self._collect(index, share, arrived, quiet=attempt > 1)))
                return
            except (RayActorError, _WorkerStuckError) as error:
                why = first_line(error)
                logger.warning(
                    "an episode worker was lost in {} step {} ({}); {}",
                    share.split,
                    share.step,
                    why,
                    f"its {len(share.tasks)} tasks are run again" if attempt < _TRIES else "its episodes are left out",
                )
                self._actors[index] = self._new_actor(index)
            except RayTaskError as error:
                arrived.put(_News(error=_as_ours(error, "an episode worker raised")))
                return
            # Whoever waits for this thread must hear of whatever it was.
            except Exception as error:
                failure = BackboneError(f"an episode worker could not be asked: {type(error).__name__}: {error}")
                failure.__cause__ = error
                arrived.put(_News(error=failure))
                return
        arrived.put(_News(episodes=lost_episodes(share, "worker", f"its worker was lost {_TRIES} times: {why}")))

    def _collect(
        self, index: int, share: BatchRequest, arrived: queue.SimpleQueue[_News], *, quiet: bool
    ) -> list[Episode]:
        rollout, judge = self.job.config.rollout, self.job.config.task_judge
        patience = (rollout.episode_timeout + judge.timeout) * (rollout.max_retries + 1) + _GRACE_SECONDS
        actor = self._actors[index]
        stream = actor.run.options(num_returns="streaming").remote(share, self.policy_version)
        episodes: list[Episode] = []
        while True:
            ready, _ = ray.wait([stream], timeout=patience)
            if not ready:
                ray.kill(actor)
                raise _WorkerStuckError(f"no episode ended within {patience:.0f} s")
            try:
                news = ray.get(next(stream))
            except StopIteration:
                return episodes
            if isinstance(news, Episode):
                episodes.append(news)
                if not quiet:
                    arrived.put(_News(shown=news))
            else:
                episodes += news


@dataclass(frozen=True)
class _News:
    shown: Episode | None = None
    episodes: Sequence[Episode] | None = None
    error: AstunerError | None = None


class _WorkerStuckError(Exception):
    pass


def _wanted_workers() -> int:
    """Return how many workers the nodes of the Ray are good for: one Python process keeps some cores busy."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    if len(nodes) == 1:  # on a CPU, Ray is told of more than there are
        return max((psutil.cpu_count() or 1) // _CORES_PER_WORKER, 1)
    return sum(max(int(node["Resources"]["CPU"]) // _CORES_PER_WORKER, 1) for node in nodes)


def _as_ours(error: RayTaskError, what: str) -> AstunerError:
    cause = error.cause
    if isinstance(cause, AstunerError):
        return type(cause)(str(cause))
    return BackboneError(f"{what}: {type(cause).__name__}: {cause}")


def _in_order(episodes: Sequence[Episode], request: BatchRequest) -> list[Episode]:
    place = {task.task_id: index for index, task in enumerate(request.tasks)}
    return sorted(episodes, key=lambda e: (place[e.task.task_id], e.repeat_index, _attempt(e)))


def _attempt(episode: Episode) -> int:
    _, mark, number = episode.episode_id.rpartition("#")
    return int(number) if mark and number.isdecimal() else 1
