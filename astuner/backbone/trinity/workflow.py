"""astuner's episodes as Trinity's runners run them (`default_workflow_type`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import ray
from trinity.common.experience import Experience
from trinity.common.workflows import Workflow

from astuner.backbone.episode_worker import EpisodeWorker, Reached, Said
from astuner.backbone.trinity.desk import DeskJob, desk
from astuner.backbone.trinity.engines import RolloutEngine
from astuner.backbone.trinity.experiences import experiences, filler
from astuner.backbone.trinity.news import Broken, Done, Ended, Running
from astuner.errors import AstunerError, BackboneError
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest

REQUEST, PLACE = "request", "place"
"""Keys of a Trinity task's `raw_task` and `index`: its share of a batch, and where that begins."""


class EpisodeWorkflow(Workflow):
    """Runs the episodes of some tasks at the same time, with the very code of the local backbone."""

    is_async = True
    can_repeat = True

    _repeats, _first = 1, 0

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Have `run_async` run that many episodes of each task, the first of which is number `run_id_base`."""
        self._repeats, self._first = repeat_times, run_id_base

    async def run_async(self) -> list[Experience]:
        """Run the episodes, tell the launcher of them, and return the samples of those that have a reward."""
        given: BatchRequest = self.task.raw_task[REQUEST]
        end = self._first + self._repeats
        only = frozenset((task.task_id, repeat) for task in given.tasks for repeat in range(self._first, end))
        request = replace(given, repeats=end, only=only)
        here = ray.get_runtime_context()
        await desk().post.remote(Running(here.get_actor_id(), here.current_actor))
        try:
            station = await asyncio.to_thread(_station)
            await station.engine.refresh(self.model)
            episodes = await asyncio.to_thread(station.run, request)
        # Trinity only logs it: the launcher has to hear of it.
        except Exception as error:
            await desk().post.remote(Broken(_told(error)))
            raise
        places = {task.task_id: self.task.index[PLACE] + number for number, task in enumerate(given.tasks)}
        made = [one for episode in episodes for one in experiences(episode, request.step, places[episode.task.task_id])]
        return made or [filler(request.step)]  # none is an error to Trinity


class _Station:
    """What a runner's process has for all its episodes."""

    def __init__(self, job: DeskJob) -> None:
        # Ray has chosen uvloop for its actors, whose loops cannot start processes in several threads at once, as
        # agents' tools do.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self.engine = RolloutEngine(tinker_service=job.tinker, max_model_len=job.max_model_len, updates=job.updates)
        self._worker = EpisodeWorker(job.agent, self.engine)

    def run(self, request: BatchRequest) -> list[Episode]:
        """Run episodes, telling the launcher of each; return those that have a reward."""
        ended: list[Episode] = []
        told: list[Any] = []
        post = desk().post.remote
        for news in self._worker.news(request):
            if isinstance(news, Said | Reached):
                told.append(post(news))
            elif isinstance(news, Episode):
                ended.append(news)
                told.append(post(Ended(request.split, request.step, news)))
            else:
                # An actor like the desk may take what it is sent in another order than it was sent in.
                ray.get(told)
                ray.get(post(Done(request.split, request.step, len(request.tasks), news)))
        return [one for one in ended if one.status == "ok"]


@cache
def _station() -> _Station:
    return _Station(ray.get(desk().job.remote()))


def _told(error: Exception) -> Exception:
    """Return the error as one that any process can read."""
    if isinstance(error, AstunerError):
        return type(error)(str(error))
    return BackboneError(f"an episode runner raised {type(error).__name__}: {error}")
