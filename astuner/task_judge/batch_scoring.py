"""Scores many episodes with a judge that takes less time than to start a thread."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Sequence

from astuner.errors import EpisodeError, EpisodeTimeout
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.scoring import (
    MAKE_FASTER,
    checked_judgement,
    close_coroutine,
    in_daemon_thread,
    judge_error,
    late_text,
)

_POLL_SECONDS = 1.0


async def score_batch(
    judge: BaseJudge, episodes: Sequence[tuple[WorkflowTask, WorkflowOutput]], timeout: float
) -> list[Judgement | EpisodeError]:
    """Score episodes one after the other in one thread, in the order of the episodes.

    Args:
        judge: the judge; its `compute_reward` is not `async`.
        episodes: the task and the output of each episode.
        timeout: time limit for each episode, in seconds. A call that takes longer is abandoned, and the other episodes
            are scored in another thread.

    Returns:
        For each episode, the checked judgement, or the error that `score` would raise.
    """
    results: list[Judgement | EpisodeError] = []
    while len(results) < len(episodes):
        batch = _Batch(judge, episodes[len(results) :], asyncio.get_running_loop())
        scoring = asyncio.ensure_future(in_daemon_thread(batch.run))
        try:
            while not scoring.done() and (left := batch.started + timeout - time.monotonic()) > 0:
                await asyncio.wait({scoring}, timeout=left)
        finally:
            batch.ended = True
        ended = len(batch.results)
        results += batch.results[:ended]
        if len(results) < len(episodes):
            scoring.cancel()
            task = episodes[len(results)][0]
            results.append(EpisodeTimeout(f"{late_text(judge, task, timeout)}; {MAKE_FASTER}"))
    return results


class _Batch:
    """Episodes that one thread scores.

    Attributes:
        results: the episodes' results so far.
        started: when the judge began with the current episode.
        ended: whether nobody waits for further results, so that the thread ends after the current episode.
    """

    def __init__(
        self, judge: BaseJudge, episodes: Sequence[tuple[WorkflowTask, WorkflowOutput]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.results: list[Judgement | EpisodeError] = []
        self.started = time.monotonic()
        self.ended = False
        self._judge, self._episodes, self._loop = judge, episodes, loop

    def run(self) -> None:
        for task, output in self._episodes:
            self.started = time.monotonic()
            result = self._score(task, output)
            if self.ended:
                return
            self.results.append(result)

    def _score(self, task: WorkflowTask, output: WorkflowOutput) -> Judgement | EpisodeError:
        try:
            answer: object = self._judge.compute_reward(task, output)
            if inspect.isawaitable(answer):
                answer = self._awaited(answer)
            return checked_judgement(answer, self._judge)
        except EpisodeError as error:
            return error
        # Whatever a judge raises fails its episode only, as in `score`.
        except BaseException as error:
            return judge_error(self._judge, error)

    def _awaited(self, answer: Awaitable[object]) -> object:
        """Return the result of an awaitable on the event loop; raise CancelledError if nobody waits for it any more."""

        async def wait() -> object:
            return await answer

        waiting = wait()
        try:
            if self.ended:
                raise RuntimeError
            future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:  # the loop is closed, or may be
            waiting.close()
            close_coroutine(answer)
            raise asyncio.CancelledError from None
        while not self.ended:  # a loop that stops in the meantime leaves the future pending
            try:
                return future.result(_POLL_SECONDS)
            except TimeoutError:
                if future.done():  # the judge raised it
                    raise
        raise asyncio.CancelledError
