"""Runs the episodes of a Trinity runner in a separate process, so that an episode cannot end the runner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from astuner.backbone.episode_workers.lost_workers import longest_wait, run_share
from astuner.backbone.episode_workers.worker import BreakpointsReached, EpisodeWorker, LogRecord, WorkerEvent
from astuner.backbone.ray_cluster.actor_stream import ActorLostError, actor_stream, to_astuner_error
from astuner.backbone.trinity.coordinator import CoordinatorJob, coordinator
from astuner.backbone.trinity.engines import RolloutEngine, RolloutWeights
from astuner.backbone.trinity.events import EpisodeFinished, EpisodesStarted, ShareFinished
from astuner.debugging.breakpoints import is_debugged, set_breakpoints
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest


class TrinityEpisodeWorker:
    """Ray actor that runs the episodes of a runner. The agent is loaded with the first share."""

    def __init__(self, job: CoordinatorJob) -> None:
        self._job = job
        self._engine: RolloutEngine | None = None

    def run(self, request: BatchRequest, weights: RolloutWeights) -> Iterator[WorkerEvent]:
        """Run episodes with these weights, and yield the worker's events.

        Raises:
            AstunerError: the agent or the judge cannot be loaded.
        """
        if self._engine is None:
            job = self._job
            engine = RolloutEngine(uses_tinker=job.uses_tinker, max_model_len=job.max_model_len, updates=job.updates)
            self._worker = EpisodeWorker(job.agent, engine)
            self._engine = engine
        asyncio.run(self._engine.set_weights(weights))
        yield from self._worker.run_episodes(request)


class EpisodeRunner:
    """Sends the shares of a runner to its episode worker, and the worker's events to the launcher.

    Attributes:
        job: the settings.
    """

    def __init__(self, job: CoordinatorJob) -> None:
        self.job = job
        self._worker: Any = None
        set_breakpoints(job.agent.breakpoints)

    def run(self, request: BatchRequest, weights: RolloutWeights, started: EpisodesStarted) -> list[Episode]:
        """Run episodes, report each to the launcher, and return those with a reward.

        Args:
            request: the episodes.
            weights: the weights to sample with.
            started: posted again after a lost worker was replaced, which takes time without any other event.

        Raises:
            AstunerError: the agent or the judge cannot be loaded, or the worker failed.
        """
        episodes: list[Episode] = []
        attempts: list[Episode] = []
        posts: list[Any] = []
        post = coordinator().post_event.remote

        def run_on_worker(share: BatchRequest) -> Iterator[WorkerEvent]:
            timeout = None if is_debugged() else longest_wait(self.job.agent.config)
            self._worker = self._worker or _start_worker(self.job)
            try:
                yield from actor_stream(self._worker.run, (share, weights), timeout)
            except ActorLostError:
                ray.kill(self._worker)
                self._worker = None
                posts.append(post(started))
                raise

        try:
            for event in run_share(request, run_on_worker):
                if isinstance(event, LogRecord | BreakpointsReached):
                    posts.append(post(event))
                elif isinstance(event, Episode):
                    episodes.append(event)
                    posts.append(post(EpisodeFinished(request.split, request.step, event)))
                else:
                    attempts += event
        except RayTaskError as error:
            raise to_astuner_error(error, "an episode worker raised an exception") from error
        # An async actor may run calls in a different order than they were made.
        ray.get(posts)
        ray.get(post(ShareFinished(request.split, request.step, len(request.episodes()), attempts)))
        return [episode for episode in episodes if episode.status == "ok"]


def _start_worker(job: CoordinatorJob) -> Any:
    """Start an episode worker on the node of this process. Ray ends it with this process."""
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(num_cpus=0)(TrinityEpisodeWorker)
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(job)
