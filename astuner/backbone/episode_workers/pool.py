"""Runs episodes in worker processes, with the engine of this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.backbone.episode_workers.fork_server import ForkServer, ForkServerJob
from astuner.backbone.episode_workers.handle import WorkerHandle
from astuner.backbone.episode_workers.messages import AgentJob
from astuner.backbone.training.episode_placement import preloaded
from astuner.debugging.breakpoints import is_debugged
from astuner.errors import BackboneError, EpisodeTimeout
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, WorkflowTask
from astuner.system.loop_thread import LoopThread
from astuner.task_rollout.active_episodes import RunningReport

# Seconds after the timeouts of an episode until it counts as blocked.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_START_ATTEMPTS = 5


class WorkerProcessPool:
    """Runs episodes, each in one of at most `workers` processes, with `engine`. A process that ends is replaced."""

    def __init__(self, job: AgentJob, codec: ChatCodec | None, workers: int) -> None:
        """Start the fork server. `codec` belongs to the agent's model; None if this process cannot be forked."""
        self.engine: LlmEngine | None = None
        self.workers = workers
        self._timeouts = job.config.rollout.episode_timeout, job.config.task_judge.timeout
        self._job = ForkServerJob(job, tuple(sys.path), tuple(preloaded(job.config, job.search)))
        self._codec = codec
        self._server: ForkServer | None = ForkServer(self._job, codec)  # before any thread starts
        self._reports: asyncio.Future[None] | None = None
        self._idle: list[WorkerHandle] = []
        self._busy: set[WorkerHandle] = set()
        self._count = 0
        self._has_loaded_agent = False
        self._judging = asyncio.Semaphore(workers)
        self._closing = threading.Lock()
        self._is_closed = False
        self._loop = LoopThread("worker-processes")

    def start_first(self) -> None:
        """Start the first process, and wait until it has loaded the agent; raise AstunerError if it cannot."""

        async def start() -> None:
            self._idle.append(await self._free_worker())

        self._loop.submit(start()).result()

    def run(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        """Yield `(index, episode)` in order of completion; raise AstunerError if a worker cannot be started."""
        results: queue.SimpleQueue[tuple[int, Episode] | Future[None]] = queue.SimpleQueue()
        batch = self._loop.submit(self._run_batch(deque(enumerate(tasks)), settings, results))
        batch.add_done_callback(results.put)
        try:
            while True:
                try:
                    result = results.get(timeout=_POLL_SECONDS)  # a wait without timeout would delay Ctrl-C
                except queue.Empty:
                    continue
                if isinstance(result, Future):
                    result.result()
                    return
                yield result
        finally:
            batch.cancel()

    def judge(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> Future[list[Episode]]:
        """Judge a group of episodes in one process."""

        async def judge() -> list[Episode]:
            async with self._judging, self._worker() as worker:
                return await worker.judge(tasks, episodes, self._deadline(self._timeouts[1]))

        return self._loop.submit(judge())

    def reports(self) -> Sequence[RunningReport]:
        """Return the report of each process that runs an episode; none if the pool is closed. Thread-safe."""

        async def collect() -> list[RunningReport]:
            return list(await asyncio.gather(*(worker.report() for worker in self._busy)))

        with self._closing:
            if self._is_closed:
                return []
            collected = self._loop.submit(collect())
        try:
            return collected.result()
        except CancelledError:  # by `close`
            return []

    def sampled_tokens(self) -> int:
        """Return the number of tokens that the running episodes have sampled, in ended calls. Thread-safe."""
        return sum(worker.sampled_tokens for worker in list(self._busy))

    def close(self) -> None:
        """End the processes."""

        async def cancelled(tasks: Set[asyncio.Future[Any] | None]) -> None:
            running = [task for task in tasks if task is not None]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        async def close() -> None:
            await cancelled(asyncio.all_tasks() - {asyncio.current_task(), self._reports})  # after an interrupt
            for worker in self._idle:
                worker.close()
            if self._server is not None:
                await asyncio.to_thread(self._server.close)
            await cancelled(asyncio.all_tasks() - {asyncio.current_task()})

        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.submit(close()).result()
        self._loop.close()

    async def _run_batch(
        self,
        todo: deque[tuple[int, WorkflowTask]],
        settings: CallSettings,
        results: queue.SimpleQueue[tuple[int, Episode] | Future[None]],
    ) -> None:
        engine = self.engine
        assert engine is not None

        async def run_some() -> None:
            while todo:
                index, task = todo.popleft()
                async with self._worker() as worker:
                    episode = await worker.run(engine, task, settings, self._deadline(sum(self._timeouts)))
                    # What a late episode has left running, or another has changed, would disturb the next one.
                    if episode.error_kind == EpisodeTimeout.kind or episode.process_effects:
                        worker.kill()
                results.put((index, episode))

        slots = [asyncio.ensure_future(run_some()) for _ in range(min(self.workers, len(todo)))]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()

    @staticmethod
    def _deadline(seconds: float) -> float | None:
        return None if is_debugged() else seconds + _GRACE_SECONDS

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerHandle]:
        """Yield a process for one request. It is ended if the block raises, and kept if it can be used again."""
        worker = await self._free_worker()
        self._busy.add(worker)
        try:
            yield worker
        except asyncio.CancelledError:
            worker.end()
            raise
        except BaseException:
            worker.kill()
            raise
        else:
            if worker.is_lost:
                worker.kill()
            else:
                self._idle.append(worker)
        finally:
            self._busy.discard(worker)

    async def _free_worker(self) -> WorkerHandle:
        while self._idle:
            worker = self._idle.pop()
            if not worker.is_lost:
                return worker
            worker.close()
        for attempt in itertools.count(1):
            if self._server is not None and self._server.has_ended:
                logger.warning("the process that starts the episode workers has ended; it is started again")
                self._server.close()
                self._server = None
                self._reports = None
            self._server = self._server or ForkServer(self._job, self._codec)
            self._reports = self._reports or asyncio.ensure_future(self._server.read_reports())
            server = self._server
            self._count += 1
            try:
                worker = await WorkerHandle.start(server, self._count)
            except BackboneError:
                # An episode may have killed the worker or the server. An agent that ends its process does it each time.
                if not self._has_loaded_agent or attempt == _START_ATTEMPTS:
                    raise
            else:
                self._has_loaded_agent = True
                return worker
        raise AssertionError


@contextlib.contextmanager
def started_pool(job: AgentJob, workers: int, codec: ChatCodec | None = None) -> Iterator[WorkerProcessPool]:
    """Start the pool of a run and its first process, which loads the agent; end its processes after the block.

    With the agent model's `codec`, the processes may be forked from this one. AstunerError: the agent cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="astuner-limits-") as limits:
        pool = WorkerProcessPool(replace(job, limits=Path(limits)), codec, workers)
        try:
            pool.start_first()
            yield pool
        finally:
            pool.close()
