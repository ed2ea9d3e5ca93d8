"""The launcher's view of what Trinity's processes do: batches of episodes, and steps of the trainer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from loguru import logger
from ray.exceptions import RayError

from astuner.backbone.episode_worker import Reached, Said, in_order
from astuner.backbone.trinity.certificate import SampleName
from astuner.backbone.trinity.desk import TRAINER
from astuner.backbone.trinity.news import Broken, Credited, Done, Ended, Measured, News, Running, Taken
from astuner.backbone.trinity.stage import Stage
from astuner.breakpoints import count_as_reached
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.model_tuner import first_line
from astuner.schema import Episode, Split
from astuner.task_rollout import BatchRequest, OnEpisode, lost_episodes, report_failures

_POLL_SECONDS = 0.5
# Beyond what an episode itself may take, before a runner is taken for stuck as a whole.
_GRACE_SECONDS = 60.0


def gone(error: Exception) -> str:
    """Return what to say where the desk does not answer."""
    return (
        f"the process that collects the run's episodes is gone: {first_line(error)}. The same command goes on from the "
        "last checkpoint"
    )


@dataclass
class _Batch:
    """What is known of a batch.

    Attributes:
        fresh: episodes that nobody has been told of.
        found: all of them, failed attempts among them.
        tasks: how many of its tasks are done.
    """

    fresh: list[Episode] = field(default_factory=list)
    found: list[Episode] = field(default_factory=list)
    tasks: int = 0


@dataclass
class Following:
    """Reads the desk's news.

    Attributes:
        config: the run's.
        desk: where they are.
        stage: Trinity's roles, once they are there.
        last: the number of the trainer's last step; 0 where it does none.
        credited: what is known of each training step that waits for the trainer, by step.
        measured: the metrics of the trainer's steps, by its own number.
        taken: what it trained on in each of them.
        trained: how many of them are done.
    """

    config: AstunerConfig
    desk: Any
    stage: Stage
    last: int = 0
    credited: dict[int, Credited] = field(default_factory=dict)
    measured: dict[int, Mapping[str, float]] = field(default_factory=dict)
    taken: dict[int, Mapping[SampleName, str]] = field(default_factory=dict)
    trained: int = 0
    _runners: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _batches: dict[tuple[Split, int], _Batch] = field(default_factory=lambda: defaultdict(_Batch))

    @property
    def waiting(self) -> int:
        """Training steps that are sampled and not yet learned from."""
        return len(self.credited)

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Return a batch's episodes, by task and then repeat, once all have ended.

        One that was run again is preceded by its failed attempts.

        Raises:
            BackboneError: nothing has ended for `asynchrony.stall_timeout`, or longer than any episode may take; or a
                process of the run ended.
        """
        key = (request.split, request.step)
        training = request.split == "train" and self.last > 0

        def over() -> bool:
            batch = self._batches[key]
            while batch.fresh:
                episode = batch.fresh.pop(0)
                on_attempt(episode)
                on_episode(episode)
            return batch.tasks == len(request.tasks) or (training and request.step in self.credited)

        self._follow(over, f"the episodes of {request.split} step {request.step}", self._episode_patience)
        found = self._batches.pop(key).found
        found += self._lost(request, found)
        ordered = in_order(found, request)
        last = {(episode.task.task_id, episode.repeat_index): episode for episode in ordered}
        report_failures(list(last.values()), request)
        return ordered

    def wait_for_update(self, step: int, number: int) -> Credited:
        """Return what is known of a training step, once the trainer has done its own step `number`.

        Raises:
            BackboneError: nothing came of the trainer for `asynchrony.stall_timeout`, or a process of the run ended.
        """
        patience = self.config.asynchrony.stall_timeout
        self._follow(lambda: step in self.credited and number <= self.trained, f"the update of step {step}", patience)
        return self.credited.pop(step)

    @property
    def _episode_patience(self) -> float:
        """Seconds after which an episode must have ended, whatever it did."""
        rollout, judge = self.config.rollout, self.config.task_judge
        longest = (rollout.episode_timeout + judge.timeout) * (rollout.max_retries + 1) + _GRACE_SECONDS
        return min(longest, self.config.asynchrony.stall_timeout)

    def _follow(self, over: Callable[[], bool], what: str, patience: float) -> None:
        """Take news until `over`; what episodes log is no news of their end."""
        heard = time.monotonic()
        while not over():
            news = self._read()
            for one in news:
                self._take(one)
            if any(not isinstance(one, Said | Reached) for one in news):
                heard = time.monotonic()
                continue
            self.stage.refuse_ended(trained=self.trained >= self.last)
            self._refuse_dead_runners()  # which die with the explorer, too
            if time.monotonic() - heard > patience:
                raise BackboneError(
                    f"nothing has come of {what} for {patience:.0f} s: a process of Trinity's is stuck (asynchrony."
                    f"stall_timeout is {self.config.asynchrony.stall_timeout:.0f} s). The same command goes on from "
                    f"the last checkpoint; Trinity's logs are in {self.stage.config.log.save_dir}"
                )

    def _read(self) -> list[News]:
        try:
            return list(ray.get(self.desk.read.remote(_POLL_SECONDS)))
        except RayError as error:
            raise BackboneError(gone(error)) from error

    def _refuse_dead_runners(self) -> None:
        """Make sure that the processes that run episodes live: Trinity would wait for what they had.

        Raises:
            BackboneError: one does not, and Trinity has not ended it for being slow.
        """
        if self.config.asynchrony.over_rollout:
            return
        for actor_id, (actor, asked) in list(self._runners.items()):
            if not ray.wait([asked], timeout=0)[0]:  # it is at work
                continue
            try:
                ray.get(asked)
            except RayError as error:
                raise BackboneError(
                    f"a process that ran episodes died with all of them: {first_line(error)}. Where memory was short, "
                    "lower rollout.max_env_worker. The same command goes on from the last checkpoint"
                ) from error
            self._ask_runner(actor_id, actor)

    def _ask_runner(self, actor_id: str, actor: Any) -> None:
        """Ask whether it lives; what comes of it is looked at later."""
        self._runners[actor_id] = actor, actor.__ray_ready__.remote()

    def _take(self, news: News) -> None:
        match news:
            case Running(actor_id, actor):
                self._ask_runner(actor_id, actor)
            case Ended(split, step, episode):
                batch = self._batches[split, step]
                batch.fresh.append(episode)
                batch.found.append(episode)
            case Done(split, step, tasks, attempts):
                batch = self._batches[split, step]
                batch.found += attempts
                batch.tasks += tasks
            case Credited(step):
                self.credited[step] = news
            case Taken(number, digests):
                self.taken[number] = digests
            case Measured(role, number, values) if role == TRAINER:
                self.measured[number], self.trained = values, max(self.trained, number)
            case Said(level, text):
                logger.log(level, "{}", text)
            case Reached(tags):
                count_as_reached(tags)
            case Broken(error):
                raise error
            case _:
                pass

    def _lost(self, request: BatchRequest, found: list[Episode]) -> list[Episode]:
        """Return failed episodes for those whose runner was lost."""
        ended = {(episode.task.task_id, episode.repeat_index) for episode in found}
        missing = frozenset((task.task_id, repeat) for task, repeat in request.episodes()) - ended
        if not missing:
            return []
        lost = BatchRequest(
            request.tasks, request.repeats, request.split, request.step, request.seed, request.settings, missing
        )
        reason = "the process that ran it was lost; Trinity's logs say how"
        if self.config.asynchrony.over_rollout:
            reason = f"its task was given up, being among the slowest (asynchrony.over_rollout), or {reason}"
        return lost_episodes(lost, "worker", reason)
