"""Runs episodes in worker processes (`rollout.isolation: process`), with the engine of this process."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from loguru import logger

from astuner.backbone.episode_workers.fork_server import ForkServer, ForkServerJob
from astuner.backbone.episode_workers.handle import WorkerHandle
from astuner.backbone.episode_workers.worker import AgentJob
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import is_debugged
from astuner.errors import BackboneError, EpisodeTimeout
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import CallSettings
from astuner.schema import Episode, WorkflowTask
from astuner.task_rollout import RunningReport

T = TypeVar("T")

# Seconds after the timeouts of an episode until its worker is killed. After 5 seconds, the worker fails an episode that
# blocks its thread. It cannot do so if C code blocks the interpreter.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.5
_PRELOADED = ("agentscope",)


class WorkerProcessPool:
    """Runs episodes, at most `workers` at a time, each in one of as many processes. A process that ends is replaced."""

    def __init__(self, job: AgentJob, engine: LlmEngine, workers: int, deadline: float) -> None:
        """Start the fork server, which loads the tokenizer while this process continues.

        Args:
            job: the agent.
            engine: answers the LLM calls of the episodes.
            workers: maximum number of processes.
            deadline: seconds after which an episode that blocks its process is ended with it.
        """
        self.engine = engine
        self._workers = workers
        self._deadline = deadline
        preload = tuple(name for name in _PRELOADED if name in sys.modules)
        self._job = ForkServerJob(job, engine.max_model_len, tuple(sys.path), preload)
        self._server: ForkServer | None = None
        self._idle: list[WorkerHandle] = []
        self._busy: set[WorkerHandle] = set()
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker-processes", daemon=True)
        self._thread.start()
        self._call(self._running_server()).result()

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

        slots = [asyncio.ensure_future(run_some()) for _ in range(min(self._workers, len(todo)))]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()

    async def _run_episode(self, task: WorkflowTask, settings: CallSettings) -> Episode:
        worker = await self._free_worker()
        self._busy.add(worker)
        is_reusable = False
        try:
            episode = await worker.run(task, settings, None if is_debugged() else self._deadline + _GRACE_SECONDS)
            # What a late episode has left running, or another has changed, would disturb the next one.
            is_harmed = episode.error_kind == EpisodeTimeout.kind or episode.process_effects
            is_reusable = not worker.is_lost and not is_harmed
        finally:
            self._busy.discard(worker)
            if is_reusable:
                self._idle.append(worker)
            else:
                worker.kill()
        return episode

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
                return await WorkerHandle.start(server, self.engine, self._count)
            except BackboneError:
                # An episode may have killed it. A process that never started a worker would fail again.
                if not server.has_started_workers:
                    raise

    async def _running_server(self) -> ForkServer:
        if self._server is not None and self._server.has_ended:
            logger.warning("the process that starts the episode workers has ended; it is started again")
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = ForkServer(self._job)
            self._replies = asyncio.ensure_future(self._server.read_replies())
        return self._server


def in_processes(config: AstunerConfig, run_inputs: RunInputs, engine: LlmEngine, workers: int) -> WorkerProcessPool:
    """Return a pool that runs a run's episodes in `workers` processes.

    Args:
        config: the resolved configuration.
        run_inputs: the agent and its model.
        engine: answers the LLM calls of the episodes.
        workers: maximum number of processes.
    """
    deadline = config.rollout.episode_timeout + config.task_judge.timeout
    return WorkerProcessPool(AgentJob.of(config, run_inputs), engine, workers, deadline)
