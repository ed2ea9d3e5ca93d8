"""Code that raises exceptions in every place of an episode, and episodes that run it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine


class OwnBaseError(BaseException):
    pass


class Quiet(BaseException):
    """Raised with a message that cannot be shown."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


ERRORS = [
    SystemExit(0),
    SystemExit("message"),
    KeyboardInterrupt(),
    GeneratorExit(),
    OwnBaseError("mine"),
    asyncio.CancelledError("nobody cancelled"),
    RecursionError("deep"),
    MemoryError("full"),
    StopIteration(3),
    StopAsyncIteration(3),
    ValueError("ordinary"),
    Quiet(),
    BaseExceptionGroup("several", [SystemExit(1), ValueError("part")]),
]


def thrower(error: BaseException) -> Callable[[], Any]:
    def throws() -> None:
        raise error

    return throws


async def in_coroutine(throws: Callable[[], Any]) -> None:
    await asyncio.sleep(0)
    throws()


async def directly(throws: Callable[[], Any]) -> None:
    throws()


async def in_wait_for(throws: Callable[[], Any]) -> None:
    await asyncio.wait_for(in_coroutine(throws), 5)


async def in_gather(throws: Callable[[], Any]) -> None:
    await asyncio.gather(asyncio.sleep(0.01), in_coroutine(throws), in_coroutine(throws))


async def in_task_group(throws: Callable[[], Any]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(in_coroutine(throws))
        group.create_task(asyncio.sleep(0.05))


async def in_awaited_task(throws: Callable[[], Any]) -> None:
    await asyncio.create_task(in_coroutine(throws))


async def in_shield(throws: Callable[[], Any]) -> None:
    await asyncio.shield(in_coroutine(throws))


async def in_executor(throws: Callable[[], Any]) -> None:
    await asyncio.to_thread(throws)


async def in_own_executor(throws: Callable[[], Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, throws)


async def in_async_generator(throws: Callable[[], Any]) -> None:
    async def generate() -> AsyncIterator[int]:
        yield 1
        throws()

    async for _ in generate():
        pass


async def in_context_manager(throws: Callable[[], Any]) -> None:
    @contextlib.asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        try:
            yield
        finally:
            throws()

    async with manager():
        await asyncio.sleep(0)


AWAITED = [
    directly,
    in_wait_for,
    in_gather,
    in_task_group,
    in_awaited_task,
    in_shield,
    in_executor,
    in_own_executor,
    in_async_generator,
    in_context_manager,
]

kept: list[Any] = []


async def in_forgotten_task(throws: Callable[[], Any]) -> None:
    asyncio.create_task(in_coroutine(throws))  # noqa: RUF006
    await asyncio.sleep(0.01)


async def in_kept_task(throws: Callable[[], Any]) -> None:
    kept.append(asyncio.create_task(in_coroutine(throws)))
    await asyncio.sleep(0.01)


async def in_call_soon(throws: Callable[[], Any]) -> None:
    asyncio.get_running_loop().call_soon(throws)
    await asyncio.sleep(0.01)


async def in_call_later(throws: Callable[[], Any]) -> None:
    asyncio.get_running_loop().call_later(0.001, throws)
    await asyncio.sleep(0.02)


async def in_done_callback(throws: Callable[[], Any]) -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    task.add_done_callback(lambda _: throws())
    await asyncio.sleep(0.01)


async def in_thread(throws: Callable[[], Any]) -> None:
    thread = threading.Thread(target=throws)
    thread.start()
    thread.join()


async def in_thread_of_a_thread(throws: Callable[[], Any]) -> None:
    await in_thread(lambda: asyncio.run(in_thread(throws)))


async def in_forgotten_executor_call(throws: Callable[[], Any]) -> None:
    kept.append(asyncio.get_running_loop().run_in_executor(None, throws))
    await asyncio.sleep(0.05)


async def in_unclosed_generator(throws: Callable[[], Any]) -> None:
    async def generate() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            throws()

    generator = generate()
    kept.append(generator)
    await anext(generator)


async def in_collected_generator(throws: Callable[[], Any]) -> None:
    async def generate() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            throws()

    await anext(generate())
    await asyncio.sleep(0.01)


async def in_finaliser(throws: Callable[[], Any]) -> None:
    class Finalised:
        def __del__(self) -> None:
            throws()

    Finalised()


async def while_cancelled(throws: Callable[[], Any]) -> None:
    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            throws()

    asyncio.create_task(waits())  # noqa: RUF006
    await asyncio.sleep(0)


FORGOTTEN = [
    in_forgotten_task,
    in_kept_task,
    in_call_soon,
    in_call_later,
    in_done_callback,
    in_thread,
    in_thread_of_a_thread,
    in_forgotten_executor_call,
    in_unclosed_generator,
    in_collected_generator,
    in_finaliser,
    while_cancelled,
]
TASKS = [in_forgotten_task, in_kept_task, in_unclosed_generator, in_collected_generator, while_cancelled]
"""Where a CancelledError says that the task is cancelled."""
Where = Callable[[Callable[[], Any]], Awaitable[None]]

Body = Callable[[], Awaitable[Any]]


def run(
    tokenizer: Any,
    bodies: dict[str, Body],
    judges: dict[str, Callable[[], Any]] | None = None,
    judge_timeout: float = 20.0,
    episode_timeout: float = 20.0,
    inline: bool = False,
) -> dict[str, Episode]:
    """Run an episode for each body or judge between sound episodes, and return those by the body's name."""
    judge_of = judges or {}

    class Faulty(Workflow):
        async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            await model_tuner.chat([{"role": "user", "content": "hi"}])
            if workflow_task.task_id in bodies:
                await bodies[workflow_task.task_id]()
            return WorkflowOutput(reward=None if workflow_task.task_id in judge_of else 1.0)

    class Judge(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return judge_of[workflow_task.task_id]()

    class AsyncJudge(BaseJudge):
        async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return await judge_of[workflow_task.task_id]()

    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    codec = ChatCodec(tokenizer, "qwen3")
    is_async = bool(judge_of) and all(inspect.iscoroutinefunction(judges) for judges in judge_of.values())
    judge = (AsyncJudge if is_async else Judge)(TaskJudgeConfig())
    runner = TaskRunner(Faulty, judge, engine, codec, episode_timeout, judge_timeout, judge_inline=inline)
    rollout = TaskRollout(EpisodesHere(runner))
    names = [name for faulty in {**bodies, **judge_of} for name in (faulty, f"sound after {faulty}")]
    tasks = [Task(name, "question") for name in names]
    episodes = {e.task.task_id: e for e in rollout.run(BatchRequest(tasks, 1, "train", 1, 1, CallSettings()))}
    rollout.close()
    assert {e.status for name, e in episodes.items() if name.startswith("sound")} == {"ok"}
    return {name: e for name, e in episodes.items() if not name.startswith("sound")}


def check_failed(episode: Episode, kind: str = "workflow") -> None:
    assert (episode.status, episode.error_kind, episode.reward, episode.samples) == ("failed", kind, None, ())
    assert len(episode.calls) == 1
    assert episode.task.task_id in (episode.error or "")
    assert "in throws" in (episode.error_traceback or "")
    assert "raise error" in (episode.error_traceback or "")
