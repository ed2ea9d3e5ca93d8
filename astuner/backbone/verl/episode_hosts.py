"""Ray actors whose worker processes run a verl run's episodes, distributed over its Ray nodes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import ray
from loguru import logger
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from astuner.backbone.episode_workers.host import EpisodeHost, longest_wait, report_batch, run_share
from astuner.backbone.episode_workers.messages import AgentJob, BreakpointsReached, LogRecord, WorkerEvent
from astuner.backbone.ray_cluster.nodes import ActorLostError, actor_stream, to_astuner_error
from astuner.backbone.verl.rollout_engine import VerlEngine
from astuner.debugging.breakpoints import add_reached_tags, is_debugged
from astuner.errors import AstunerError, BackboneError, first_line
from astuner.schema import Episode
from astuner.system.redaction.redactor import learn_secrets
from astuner.task_rollout.active_episodes import ActiveEpisodes, RunningReport
from astuner.task_rollout.rollout import BatchRequest, OnEpisode

_CORES_PER_HOST = 8
_START_SECONDS = 600.0
_REPORT_SECONDS = 5.0
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class VerlEpisodeHost(EpisodeHost):
    """Ray actor that runs a share of each batch. A separate thread reports the running episodes."""

    THREADS: ClassVar[dict[str, int]] = {"report": 1}
    """Ray's `concurrency_groups`."""

    def __init__(self, job: AgentJob, engine: VerlEngine) -> None:
        """Start the first worker process (see `EpisodeHost`); `engine` is the client for all verl engines."""
        self._engine = engine
        super().__init__(job, engine)

    @ray.method(concurrency_group="report")
    def report(self) -> RunningReport:
        """Return what each running episode is doing."""
        return super().report()

    def run(self, request: BatchRequest, policy_version: int) -> Iterator[WorkerEvent]:
        """Run episodes with the engines' weights of that version, and yield its events."""
        self._engine.policy_version = policy_version
        yield from self.run_episodes(request)


@dataclass(frozen=True)
class _Finished:
    """Episodes that arrived from a host; if not `final`, they are failed attempts that are retried."""

    episodes: Sequence[Episode]
    final: bool


_Results = queue.SimpleQueue[_Finished | AstunerError | None]
"""Queue from the threads that run shares to `EpisodeHosts.run`; None marks the end of a share."""


@dataclass
class EpisodeHosts:
    """Runs batches of episodes on Ray actors. A host that dies is replaced, and its remaining episodes run again.

    Attributes:
        running: registry of running episodes, to which the hosts' episodes are added.
        interrupted: whether a batch did not end, so that the engines may still have requests.
    """

    job: AgentJob
    engine: VerlEngine
    running: ActiveEpisodes
    policy_version: int = 0
    interrupted: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    _actors: list[Any] = field(default_factory=list, init=False)
    _env_workers: list[int] = field(default_factory=list, init=False)
    _node_ids: list[str] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start the hosts; raise AstunerError if one cannot load the agent, or does not start."""
        total = self.job.config.rollout.max_env_worker
        # A host is a single Python process, which passes on the LLM calls of about eight cores of workers.
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        # On a CPU, a Ray of one node declares more cores than there are.
        cores = [_available_cores()] if len(nodes) == 1 else [node["Resources"]["CPU"] for node in nodes]
        counts = [max(int(number) // _CORES_PER_HOST, 1) for number in cores]
        rounds = range(max(counts))
        self._node_ids = [
            node["NodeID"] for n in rounds for node, count in zip(nodes, counts, strict=True) if n < count
        ][:total]
        count = len(self._node_ids)
        self._env_workers = [total // count + (index < total % count) for index in range(count)]
        self._actors = [self._start_actor(index) for index in range(count)]
        try:
            for variables in ray.get([actor.ready.remote() for actor in self._actors], timeout=_START_SECONDS):
                learn_secrets(variables)
        except RayTaskError as error:
            raise to_astuner_error(error, "an episode host did not start") from error
        except GetTimeoutError as error:
            raise BackboneError(
                f"the {count} episode hosts did not start within {_START_SECONDS:.0f} s; Ray has "
                f"{ray.available_resources()} free of {ray.cluster_resources()}"
            ) from error
        except RayError as error:
            raise BackboneError(f"an episode host did not start: {first_line(error)}") from error

    def _start_actor(self, index: int) -> Any:
        rollout = self.job.config.rollout.model_copy(update={"max_env_worker": self._env_workers[index]})
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        node = self._node_ids[index] if self._node_ids[index] in alive else alive[index % len(alive)]
        actor = ray.remote(concurrency_groups=VerlEpisodeHost.THREADS)(VerlEpisodeHost)
        actor = actor.options(
            # Episodes mostly wait for the engines. With a reserved core, a host could wait forever for verl's.
            num_cpus=0,
            # Ray's SPREAD strategy and soft affinity put all actors without reserved cores on a single node.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        job = replace(self.job, config=self.job.config.model_copy(update={"rollout": rollout}))
        return actor.remote(job, self.engine)

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Run a batch; return its episodes by task and repeat, a retried one after its failed attempts.

        BackboneError: a host raised an exception, which is a bug in astuner.
        """
        results: _Results = queue.SimpleQueue()
        shares = [request.tasks[index :: len(self._actors)] for index in range(len(self._actors))]
        requests = [(index, replace(request, tasks=tasks)) for index, tasks in enumerate(shares) if tasks]
        for index, share in requests:
            threading.Thread(target=self._share_thread, args=(index, share, results), daemon=True).start()
        episodes: list[Episode] = []
        unfinished = len(requests)
        with self.running.include_remote(self._reports), self._closed_after_errors():
            while unfinished:
                result = results.get()
                if isinstance(result, AstunerError):
                    raise result
                if result is None:
                    unfinished -= 1
                    continue
                for episode in result.episodes:
                    episodes.append(episode)
                    on_attempt(episode)
                    if result.final:
                        on_episode(episode)
        return report_batch(episodes, request)

    @contextlib.contextmanager
    def _closed_after_errors(self) -> Iterator[None]:
        """Kill the hosts if the batch does not end, for example after Ctrl-C. No further batch can run."""
        try:
            yield
        except BaseException:
            self.interrupted = True
            self.close()
            raise

    def close(self) -> None:
        """Kill the hosts, which also ends their worker processes."""
        self._closed = True
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()

    def _reports(self) -> list[RunningReport]:
        calls = [actor.report.remote() for actor in self._actors]
        in_time, _ = ray.wait(calls, num_returns=len(calls), timeout=_REPORT_SECONDS)
        reports = []
        for number, call in enumerate(calls, 1):
            reason = f"did not answer within {_REPORT_SECONDS:g} s"
            if call in in_time:
                try:
                    reports.append(ray.get(call))
                    continue
                except RayError as error:
                    reason = f"died: {first_line(error)}"
            reports.append(RunningReport(0, (f"episode host {number} {reason}",)))
        return reports

    def _share_thread(self, index: int, share: BatchRequest, results: _Results) -> None:
        """Run a host's share in this thread, and put episodes, and then None or an error, into `results`."""
        try:
            for event in run_share(share, lambda request: self._run_on_host(index, request)):
                if isinstance(event, Episode):
                    results.put(_Finished([event], final=True))
                elif isinstance(event, LogRecord):
                    logger.log(event.level, "{}", event.text)
                elif isinstance(event, BreakpointsReached):
                    add_reached_tags(event.tags)
                else:
                    results.put(_Finished(event, final=False))
        except RayTaskError as error:
            results.put(to_astuner_error(error, "an episode host raised an exception"))
        # Any exception must reach `run`, which would wait forever otherwise.
        except Exception as error:
            failure = BackboneError(f"calling an episode host failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            results.put(failure)
        else:
            results.put(None)

    def _run_on_host(self, index: int, request: BatchRequest) -> Iterator[WorkerEvent]:
        """Run episodes on a host and yield its events. A lost host is replaced."""
        timeout = None if is_debugged() else longest_wait(self.job.config)
        try:
            yield from actor_stream(self._actors[index].run, (request, self.policy_version), timeout)
        except ActorLostError:
            if self._closed:
                raise BackboneError("the run was interrupted") from None
            ray.kill(self._actors[index])
            self._replace_actor(index)
            raise

    def _replace_actor(self, index: int) -> None:
        """Start a host in place of a lost one, and wait until it is ready."""
        failure: Exception | None = None
        for _ in range(len(self._node_ids) + 1):
            if self._closed:
                raise BackboneError("the run was interrupted")
            self._actors[index] = self._start_actor(index)
            try:
                learn_secrets(ray.get(self._actors[index].ready.remote(), timeout=_START_SECONDS))
                return
            except (RayTaskError, GetTimeoutError):
                raise
            # For some seconds, Ray takes a lost node for alive. Then it gives up the host that was to start there.
            except RayError as error:
                failure = error
        assert failure is not None
        raise BackboneError(f"no episode host could be started in place of a lost one: {first_line(failure)}")


def _available_cores() -> float:
    """Return the number of cores that this process may use, by CPU affinity and cgroup quota."""
    cores = float(psutil.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CGROUP_QUOTA.read_text().split()
        cores = min(cores, int(quota) / int(period))  # int("max") raises: no quota
    return cores
