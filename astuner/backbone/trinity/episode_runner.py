"""Runs the episodes of a Trinity runner in a separate process, so that an episode cannot end the runner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayTaskError

from astuner.backbone.episode_workers.host import EpisodeHost, longest_wait, run_share
from astuner.backbone.episode_workers.messages import BreakpointsReached, LogRecord, WorkerEvent
from astuner.backbone.ray_cluster.nodes import ActorLostError, actor_stream, on_this_node, to_astuner_error
from astuner.backbone.trinity.coordinator import (
    CoordinatorJob,
    EpisodeFinished,
    EpisodesStarted,
    ShareFinished,
    coordinator,
)
from astuner.backbone.trinity.engines import RolloutEngine, RolloutWeights
from astuner.debugging.breakpoints import is_debugged, set_breakpoints
from astuner.schema import Episode
from astuner.task_rollout.rollout import BatchRequest


class TrinityEpisodeHost:
    """Ray actor that runs the episodes of a runner. The agent is loaded with the first share."""

    def __init__(self, job: CoordinatorJob) -> None:
        self._job = job
        self._engine: RolloutEngine | None = None

    def run(self, request: BatchRequest, weights: RolloutWeights) -> Iterator[WorkerEvent]:
        """Run episodes with these weights, and yield the host's events. AstunerError: the agent cannot be loaded."""
        if self._engine is None:
            job = self._job
            engine = RolloutEngine(uses_tinker=job.uses_tinker, max_model_len=job.max_model_len, updates=job.updates)
            self._host = EpisodeHost(job.agent, engine)
            self._engine = engine
        asyncio.run(self._engine.set_weights(weights))
        yield from self._host.run_episodes(request)


class EpisodeRunner:
    """Sends the shares of a runner to its episode host, and the host's events to the launcher."""

    def __init__(self, job: CoordinatorJob) -> None:
        self.job = job
        self._host: Any = None
        set_breakpoints(job.agent.breakpoints)

    def run(self, request: BatchRequest, weights: RolloutWeights, started: EpisodesStarted) -> list[Episode]:
        """Run episodes, report each to the launcher, and return those with a reward; AstunerError: the host failed.

        `started` is posted again after a lost host was replaced, which takes time without any other event.
        """
        episodes: list[Episode] = []
        attempts: list[Episode] = []
        posts: list[Any] = []
        post = coordinator().post_event.remote

        def run_on_host(share: BatchRequest) -> Iterator[WorkerEvent]:
            timeout = None if is_debugged() else longest_wait(self.job.agent.config)
            if self._host is None:  # Ray ends it with this process, on whose node it runs
                self._host = ray.remote(TrinityEpisodeHost).options(**on_this_node()).remote(self.job)
            try:
                yield from actor_stream(self._host.run, (share, weights), timeout)
            except ActorLostError:
                ray.kill(self._host)
                self._host = None
                posts.append(post(started))
                raise

        try:
            for event in run_share(request, run_on_host):
                if isinstance(event, LogRecord | BreakpointsReached):
                    posts.append(post(event))
                elif isinstance(event, Episode):
                    episodes.append(event)
                    posts.append(post(EpisodeFinished(request.split, request.step, event)))
                else:
                    attempts += event
        except RayTaskError as error:
            raise to_astuner_error(error, "an episode host raised an exception") from error
        # An async actor may run calls in a different order than they were made.
        ray.get(posts)
        ray.get(post(ShareFinished(request.split, request.step, len(request.episodes()), attempts)))
        return [episode for episode in episodes if episode.status == "ok"]
