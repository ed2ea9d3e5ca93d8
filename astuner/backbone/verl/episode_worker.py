"""The Ray actor that runs a share of the episodes on verl's engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import ray

from astuner.backbone.episode_worker import AgentJob, EpisodeWorker, News
from astuner.backbone.verl.client_engine import VerlEngine
from astuner.task_rollout import BatchRequest, RunningReport


@dataclass(frozen=True)
class WorkerJob(AgentJob):
    """What every episode worker of a run is given.

    Attributes:
        engine: all of verl's engines.
    """

    engine: VerlEngine


class VerlEpisodeWorker(EpisodeWorker):
    """Runs shares of batches on verl's engines, and says what they are at from a thread of its own."""

    THREADS: ClassVar[dict[str, int]] = {"report": 1}
    """Ray's `concurrency_groups`."""

    def __init__(self, job: WorkerJob) -> None:
        """Load agent and judge.

        Raises:
            AstunerError: they cannot be loaded here, e.g. since a node lacks the user's files.
        """
        self._engine = job.engine
        super().__init__(job, job.engine)

    @ray.method(concurrency_group="report")
    def report(self) -> RunningReport:
        """Say of each episode that runs here what it is at."""
        return super().report()

    def run(self, request: BatchRequest, policy_version: int) -> Iterator[News]:
        """Yield what `news` does, of episodes that are sampled with weights of that version."""
        self._engine.policy_version = policy_version
        yield from self.news(request)
