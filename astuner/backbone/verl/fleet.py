"""The episode workers of a run, over all nodes of its Ray."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from loguru import logger
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from astuner.backbone.episode_worker import Reached, Said, in_order
from astuner.backbone.verl.episode_worker import VerlEpisodeWorker, WorkerJob
from astuner.breakpoints import count_as_reached, is_debugged
from astuner.errors import AstunerError, BackboneError
from astuner.model_tuner import first_line
from astuner.run_record import learn_secrets
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, OnEpisode, RunningEpisodes, RunningReport, lost_episodes, report_failures

_CORES_PER_WORKER = 8
_TRIES_TOGETHER = 2
# Beyond what an episode itself may take, before its worker is taken for stuck as a whole.
_GRACE_SECONDS = 60.0
_START_SECONDS = 600.0
_SECONDS_TO_REPORT = 5.0
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass
class EpisodeFleet:
    """Runs batches of episodes in Ray actors; where one dies, another is started for what is left of its share.

    Attributes:
        job: what each worker is given.
        running: is to know the episodes that run in the workers.
        policy_version: the weights that the engines have.
    """

    job: WorkerJob
    running: RunningEpisodes
    policy_version: int = 0
    _actors: list[Any] = field(default_factory=list, init=False)
    _shares: list[int] = field(default_factory=list, init=False)
    _places: list[str] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start the workers.

        Raises:
            AstunerError: one cannot load the agent.
        """
        most = self.job.config.rollout.max_env_worker
        self._places = _places_for_workers()[:most]
        count = len(self._places)
        self._shares = [most // count + (index < most % count) for index in range(count)]
        self._actors = [self._new_actor(index) for index in range(count)]
        try:
            for variables in ray.get([actor.ready.remote() for actor in self._actors], timeout=_START_SECONDS):
                learn_secrets(variables)
        except RayTaskError as error:
            raise _as_ours(error, "an episode worker did not start") from error
        except GetTimeoutError as error:
            raise BackboneError(
                f"the {count} episode workers did not start within {_START_SECONDS:.0f} s; Ray has "
                f"{ray.available_resources()} left of {ray.cluster_resources()}"
            ) from error
        except RayError as error:
            raise BackboneError(f"an episode worker did not start: {first_line(error)}") from error

    def _new_actor(self, index: int) -> Any:
        config = self.job.config
        own = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"max_env_worker": self._shares[index]})}
        )
        # Ray's own ways to spread, and to prefer a node, put actors that take no core on one node all the same.
        node = NodeAffinitySchedulingStrategy(self._place(index), soft=False)
        # Episodes mostly wait for engines: a worker must not have to wait for a core that verl's processes hold.
        actor = ray.remote(concurrency_groups=VerlEpisodeWorker.THREADS)(VerlEpisodeWorker)
        actor = actor.options(num_cpus=0, scheduling_strategy=node)
        return actor.remote(replace(self.job, config=own))

    def _place(self, index: int) -> str:
        """Return the id of a worker's node, or of another where that one is gone."""
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return self._places[index] if self._places[index] in alive else str(alive[index % len(alive)])

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Return the episodes, by task and then repeat; an episode that was run again is preceded by its attempts.

        Raises:
            BackboneError: a worker raised, which is a bug of ours.
        """
        arrived: _Arrived = queue.SimpleQueue()
        shares = [request.tasks[index :: len(self._actors)] for index in range(len(self._actors))]
        busy = [(index, replace(request, tasks=tasks)) for index, tasks in enumerate(shares) if tasks]
        for index, share in busy:
            threading.Thread(target=self._follow, args=(index, share, arrived), daemon=True).start()
        found: list[Episode] = []
        with self.running.elsewhere(self._reports):
            for news in _until_all_ended(arrived, len(busy)):
                for episode in news.episodes:
                    found.append(episode)
                    on_attempt(episode)
                    if news.ended:
                        on_episode(episode)
        ordered = in_order(found, request)
        last = {(episode.task.task_id, episode.repeat_index): episode for episode in ordered}
        report_failures(list(last.values()), request)
        return ordered

    def close(self) -> None:
        """End the workers, and with them their threads."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()

    def _reports(self) -> list[RunningReport]:
        """What each worker says of its episodes; of one that does not answer in time, that."""
        asked = [actor.report.remote() for actor in self._actors]
        in_time, _ = ray.wait(asked, num_returns=len(asked), timeout=_SECONDS_TO_REPORT)
        return [_report(number, ask, in_time=ask in in_time) for number, ask in enumerate(asked, 1)]

    def _follow(self, index: int, share: BatchRequest, arrived: _Arrived) -> None:
        """Have one worker run its share, in a thread that waits for it."""
        try:
            self._run_share(index, share, arrived)
        except RayTaskError as error:
            arrived.put(_as_ours(error, "an episode worker raised"))
        # Whoever waits for this thread must hear of whatever it was.
        except Exception as error:
            failure = BackboneError(f"an episode worker could not be asked: {type(error).__name__}: {error}")
            failure.__cause__ = error
            arrived.put(failure)
        else:
            arrived.put(None)

    def _run_share(self, index: int, share: BatchRequest, arrived: _Arrived) -> None:
        """Run a share, again what a lost worker left of it, and then one by one: so only the guilty are left out."""
        missing = {(task.task_id, repeat) for task, repeat in share.episodes()}
        for _ in range(_TRIES_TOGETHER):
            if missing:
                self._ask(index, share, missing, arrived)
        for pair in sorted(missing):
            alone = {pair}
            why = self._ask(index, share, alone, arrived)
            if alone:
                error = f"its worker was lost {_TRIES_TOGETHER + 1} times, at last with this episode alone: {why}"
                lost = lost_episodes(replace(share, only=frozenset(alone)), "worker", error)
                arrived.put(_News(lost, ended=True))

    def _ask(self, index: int, share: BatchRequest, missing: set[tuple[str, int]], arrived: _Arrived) -> str:
        """Have a worker run what is `missing` of a share, and take from it what arrives; return why it was lost."""
        try:
            self._collect(index, replace(share, only=frozenset(missing)), missing, arrived)
        except RayTaskError:
            raise
        # Of many kinds: a node that goes takes the actor, its objects, or their owner.
        except (RayError, _WorkerStuckError) as error:
            logger.warning(
                "an episode worker was lost in {} step {} ({}); {} of its episodes had not ended",
                share.split,
                share.step,
                first_line(error),
                len(missing),
            )
            ray.kill(self._actors[index])
            self._actors[index] = self._new_actor(index)
            return first_line(error)
        return "it ended without this episode"

    def _collect(self, index: int, request: BatchRequest, missing: set[tuple[str, int]], arrived: _Arrived) -> None:
        rollout, judge = self.job.config.rollout, self.job.config.task_judge
        seconds = (rollout.episode_timeout + judge.timeout) * (rollout.max_retries + 1) + _GRACE_SECONDS
        patience = None if is_debugged() else seconds
        stream = self._actors[index].run.options(num_returns="streaming").remote(request, self.policy_version)
        while True:
            ready, _ = ray.wait([stream], timeout=patience)
            if not ready:
                raise _WorkerStuckError(f"no episode ended within {seconds:.0f} s")
            try:
                news = ray.get(next(stream))
            except StopIteration:
                return
            if isinstance(news, Episode):
                missing.discard((news.task.task_id, news.repeat_index))
                arrived.put(_News([news], ended=True))
            elif isinstance(news, Said):
                logger.log(news.level, "{}", news.text)
            elif isinstance(news, Reached):
                count_as_reached(news.tags)
            else:
                arrived.put(_News(news, ended=False))


@dataclass(frozen=True)
class _News:
    """Episodes; those that have not `ended` are failed attempts at others."""

    episodes: Sequence[Episode]
    ended: bool


# None at the end of a share.
_Arrived = queue.SimpleQueue[_News | AstunerError | None]


class _WorkerStuckError(Exception):
    pass


def _until_all_ended(arrived: _Arrived, shares: int) -> Iterator[_News]:
    """Give what arrives until every share has ended.

    Raises:
        AstunerError: that arrives.
    """
    while shares:
        news = arrived.get()
        if isinstance(news, AstunerError):
            raise news
        if news is None:
            shares -= 1
        else:
            yield news


def _report(number: int, answer: Any, *, in_time: bool) -> RunningReport:
    """Return a worker's answer to how its episodes stand, or why there is none."""
    why = f"does not answer within {_SECONDS_TO_REPORT:g} s: something in it keeps all its threads waiting"
    if in_time:
        try:
            found: RunningReport = ray.get(answer)
        except RayError as error:
            why = f"is gone: {first_line(error)}"
        else:
            return found
    return RunningReport(0, (f"episode worker {number} {why}",))


def _places_for_workers() -> list[str]:
    """Return a node's id for each worker that the Ray is good for, one of each node first.

    One Python process keeps some cores busy.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    # On a CPU, a Ray of one node is told of more cores than there are.
    cores = [_cores()] if len(nodes) == 1 else [node["Resources"]["CPU"] for node in nodes]
    counts = [max(int(number) // _CORES_PER_WORKER, 1) for number in cores]
    rounds = range(max(counts))
    return [node["NodeID"] for n in rounds for node, count in zip(nodes, counts, strict=True) if n < count]


def _cores() -> float:
    """Return how many cores this process may use, by affinity and by its container's quota."""
    cores = float(psutil.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CGROUP_QUOTA.read_text().split()
        cores = min(cores, int(quota) / int(period))  # `max` for none
    return cores


def _as_ours(error: RayTaskError, what: str) -> AstunerError:
    """Return the error of another process as one of ours, behind which stands the traceback that it had there."""
    cause = error.cause
    known = isinstance(cause, AstunerError)
    ours = type(cause)(str(cause)) if known else BackboneError(f"{what}: {type(cause).__name__}: {cause}")
    ours.__cause__ = error
    return ours
