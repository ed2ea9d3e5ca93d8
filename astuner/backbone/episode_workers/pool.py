"""Runs episodes in worker processes, with the engine of this process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from astuner.backbone.episode_workers.fork_server import ForkServer, ForkServerJob
from astuner.backbone.episode_workers.handle import WorkerHandle
from astuner.backbone.episode_workers.worker import AgentJob
from astuner.backbone.training.episode_placement import parallel_episodes, preloaded
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import is_debugged
from astuner.errors import BackboneError, EpisodeTimeout
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import CallSettings, ChatCodec
from astuner.schema import Episode, WorkflowTask
from astuner.task_rollout import RunningReport

T = TypeVar("T")

# Seconds after the timeouts of an episode until its worker is killed. After 5 seconds, the worker fails an episode that
# blocks its thread. It cannot do so if C code blocks the interpreter.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.5


class WorkerProcessPool:
    """Runs episodes, at most `workers` at a time, each in one of as many processes. A process that ends is replaced.

    Attributes:
        engine: answers the LLM calls of the episodes; set before `run`.
        workers: the maximum number of processes.
    """

    def __init__(self, job: AgentJob, codec: ChatCodec, workers: int, preload: Sequence[str] = ()) -> None:
        """Start the fork server.

        Args:
            job: the agent.
            codec: the codec of its model.
            workers: maximum number of processes.
            preload: modules that the agent imports, which the processes share.
        """
        self.engine: LlmEngine | None = None
        self.workers = workers
        self._timeouts = job.config.rollout.episode_timeout, job.config.task_judge.timeout
        self._job = ForkServerJob(job, tuple(sys.path), tuple(preload))
        self._codec = codec
        self._server: ForkServer | None = ForkServer(self._job, codec)  # before any thread starts
        self._replies: asyncio.Future[None] | None = None
        self._idle: list[WorkerHandle] = []
        self._busy: set[WorkerHandle] = set()
        self._count = 0
        self._judging = asyncio.Semaphore(workers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker-processes", daemon=True)
        self._thread.start()

    def start_first(self) -> None:
        """Start the first process, and wait until it has loaded the agent.

        Raises:
            AstunerError: it cannot load the agent, or has ended.
        """

        async def start() -> None:
            self._idle.append(await self._free_worker())

        self._call(start()).result()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        """Yield `(index, episode)` in order of completion.

        Raises:
            AstunerError: a worker cannot be started.
            DebuggerQuit: the user quit the debugger.
        """
        results: queue.SimpleQueue[tuple[int, Episode] | Future[None]] = queue.SimpleQueue()
        batch = self._call(self._run_batch(deque(enumerate(tasks)), settings, results))
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
        """Judge a group of episodes in one of the processes."""

        async def judge() -> list[Episode]:
            async with self._judging, self._worker() as worker:
                return await worker.judge(tasks, episodes, self._deadline(self._timeouts[1]))

        return self._call(judge())

    def reports(self) -> Sequence[RunningReport]:
        """Return the report of each process that runs an episode. Thread-safe."""

        async def collect() -> list[RunningReport]:
            return list(await asyncio.gather(*(worker.report() for worker in self._busy)))

        return self._call(collect()).result()

    def close(self) -> None:
        """End the processes."""

        async def close() -> None:
            for worker in (*self._idle, *self._busy):
                worker.close()
            if self._server is not None:
                await asyncio.to_thread(self._server.close)

        if self._loop.is_closed():
            return
        self._call(close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _run_batch(
        self,
        todo: deque[tuple[int, WorkflowTask]],
        settings: CallSettings,
        results: queue.SimpleQueue[tuple[int, Episode] | Future[None]],
    ) -> None:
        async def run_some() -> None:
            while todo:
                index, task = todo.popleft()
                results.put((index, await self._run_episode(task, settings)))

        slots = [asyncio.ensure_future(run_some()) for _ in range(min(self.workers, len(todo)))]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()

    async def _run_episode(self, task: WorkflowTask, settings: CallSettings) -> Episode:
        assert self.engine is not None
        async with self._worker() as worker:
            episode = await worker.run(self.engine, task, settings, self._deadline(sum(self._timeouts)))
            # What a late episode has left running, or another has changed, would disturb the next one.
            if episode.error_kind == EpisodeTimeout.kind or episode.process_effects:
                worker.kill()
        return episode

    @staticmethod
    def _deadline(seconds: float) -> float | None:
        return None if is_debugged() else seconds + _GRACE_SECONDS

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerHandle]:
        """Yield a process for one request. It is killed if the block raises, and kept if it can be used again."""
        worker = await self._free_worker()
        self._busy.add(worker)
        try:
            yield worker
        except BaseException:
            worker.kill()
            raise
        finally:
            self._busy.discard(worker)
            if worker.is_lost:
                worker.kill()
            else:
                self._idle.append(worker)

    async def _free_worker(self) -> WorkerHandle:
        while self._idle:
            worker = self._idle.pop()
            if not worker.is_lost:
                return worker
            worker.close()
        while True:
            server = await self._running_server()
            self._count += 1
            try:
                return await WorkerHandle.start(server, self._count)
            except BackboneError:
                # An episode may have killed it. A process that never started a worker would fail again.
                if not server.has_started_workers:
                    raise

    async def _running_server(self) -> ForkServer:
        if self._server is not None and self._server.has_ended:
            logger.warning("the process that starts the episode workers has ended; it is started again")
            self._server.close()
            self._server = None
            self._replies = None
        self._server = self._server or ForkServer(self._job, self._codec)
        self._replies = self._replies or asyncio.ensure_future(self._server.read_replies())
        return self._server


@contextlib.contextmanager
def started_pool(config: AstunerConfig, run_inputs: RunInputs) -> Iterator[WorkerProcessPool]:
    """Start the pool of a run and its first process, which loads the agent; end its processes after the block.

    Args:
        config: the resolved configuration.
        run_inputs: the agent and its model.

    Raises:
        AstunerError: the agent cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="astuner-limits-") as limits:
        job = replace(AgentJob.of(config, run_inputs), limits=Path(limits))
        pool = WorkerProcessPool(job, run_inputs.codec, parallel_episodes(config), preloaded(config, run_inputs.search))
        try:
            pool.start_first()
            yield pool
        finally:
            pool.close()
