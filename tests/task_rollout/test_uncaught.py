"""An exception of an episode or a judge, in any task, callback, thread or finaliser, fails that episode only."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.llm_engine.scripted import ScriptedEngine
from astuner.model_tuner import CallSettings, ChatCodec
from astuner.schema import Episode, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout import BatchRequest, TaskRollout
from astuner.task_runner import TaskRunner


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


@pytest.fixture(params=["threads", "main thread"])
def in_main_thread(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "main thread")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    kept.clear()


Body = Callable[[], Awaitable[Any]]


def run(
    tokenizer: Any,
    in_main_thread: bool,
    bodies: dict[str, Body],
    judges: dict[str, Callable[[], Any]] | None = None,
    judge_timeout: float = 20.0,
    episode_timeout: float = 20.0,
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
    runner = TaskRunner(Faulty, judge, engine, codec, episode_timeout, judge_timeout, judge_inline=in_main_thread)
    rollout = TaskRollout(runner, workers=2, in_main_thread=in_main_thread)
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


THROWERS = {type(error).__name__: thrower(error) for error in ERRORS}


@pytest.mark.parametrize("where", AWAITED)
def test_exceptions_that_a_workflow_awaits(tokenizer: Any, in_main_thread: bool, where: Where):
    bodies = {name: partial(where, throws) for name, throws in THROWERS.items()}
    for name, episode in run(tokenizer, in_main_thread, bodies).items():
        if name == "CancelledError" and where is in_task_group:
            assert episode.status == "ok"  # a group ignores a task that is cancelled
        elif name == "CancelledError":  # asyncio replaces it, without its traceback
            assert (episode.status, episode.error_kind) == ("failed", "workflow")
        else:
            check_failed(episode)


@pytest.mark.parametrize("where", FORGOTTEN)
def test_exceptions_that_nothing_awaits(tokenizer: Any, in_main_thread: bool, where: Where):
    bodies = {name: partial(where, throws) for name, throws in THROWERS.items()}
    for name, episode in run(tokenizer, in_main_thread, bodies).items():
        if name == "CancelledError" and where in TASKS:
            assert episode.status == "ok"  # the task counts as cancelled
        elif name == "GeneratorExit" and where in (in_unclosed_generator, in_collected_generator):
            assert episode.status == "ok"  # the regular end of a generator
        else:
            check_failed(episode)


@pytest.mark.parametrize("where", [*AWAITED, in_forgotten_task, in_call_soon, in_thread, in_finaliser, "sync"])
def test_exceptions_of_a_judge(tokenizer: Any, in_main_thread: bool, where: Any):
    async def judges(throws: Callable[[], Any]) -> tuple[float, bool]:
        await where(throws)
        return 1.0, True

    judge_of = THROWERS
    if where != "sync":
        judge_of = {name: partial(judges, throws) for name, throws in judge_of.items()}
    for name, episode in run(tokenizer, in_main_thread, {}, judge_of).items():
        if where in FORGOTTEN:
            if name == "CancelledError" and where in TASKS:
                assert episode.status == "ok"
            else:
                check_failed(episode)
        elif name == "CancelledError" and where is in_task_group:
            assert episode.status == "ok"
        elif name == "CancelledError":
            assert (episode.status, episode.error_kind) == ("failed", "judge")
        else:
            check_failed(episode, "judge")


class Exhausted(StopIteration):
    pass


async def in_executor_of_processes(throws: Callable[[], Any]) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, next, iter(()))


async def in_concurrent_future(throws: Callable[[], Any]) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    threading.Timer(0.01, future.set_exception, [error_of(throws)]).start()
    await asyncio.wrap_future(future)


async def in_future_of_the_loop(throws: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_exception, error_of(throws))
    await future


async def in_future_with_a_class(throws: Callable[[], Any]) -> None:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(type(error_of(throws)))
    await future


def error_of(throws: Callable[[], Any]) -> BaseException:
    try:
        throws()
    except StopIteration as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize("is_judge", [False, True])
@pytest.mark.parametrize(
    "where",
    [
        in_executor,
        in_own_executor,
        in_executor_of_processes,
        in_concurrent_future,
        in_future_of_the_loop,
        in_future_with_a_class,
    ],
)
def test_stop_iteration_of_a_future_is_named(tokenizer: Any, in_main_thread: bool, is_judge: bool, where: Where):
    """A future of asyncio rejects it, so the await would last until the timeout."""
    throws = {"plain": thrower(StopIteration(3)), "subclass": thrower(Exhausted()), "next": lambda: next(iter(()))}
    bodies = {name: partial(where, throw) for name, throw in throws.items()}
    episodes = run(tokenizer, in_main_thread, {}, bodies) if is_judge else run(tokenizer, in_main_thread, bodies)
    for episode in episodes.values():
        assert (episode.status, episode.error_kind) == ("failed", "judge" if is_judge else "workflow")
        assert "raised StopIteration" in (episode.error or "") or "raised Exhausted" in (episode.error or "")
        assert "next(iterator, default)" in (episode.error or "")
        assert "test_uncaught.py" in (episode.error or "")


def test_timeout_names_the_failed_callback_and_thread(tokenizer: Any, in_main_thread: bool):
    async def waits_for(throws: Callable[[], Any], start: Callable[[Callable[[], Any]], object]) -> None:
        start(throws)
        await asyncio.Future()

    throws = thrower(ValueError("no result"))
    bodies = {
        "callback": partial(waits_for, throws, lambda call: asyncio.get_running_loop().call_soon(call)),
        "thread": partial(waits_for, throws, lambda call: threading.Thread(target=call).start()),
    }
    for name, episode in run(tokenizer, in_main_thread, bodies, episode_timeout=2.0).items():
        assert (episode.status, episode.error_kind) == ("failed", "timeout")
        assert "took longer than rollout.episode_timeout (2 s)" in (episode.error or "")
        assert "; ValueError: no result (at " in (episode.error or "")
        assert f"in a {name}" in (episode.error or "")


def test_a_workflow_can_handle_the_stop_iteration_of_a_future(tokenizer: Any, in_main_thread: bool):
    async def handles() -> None:
        with pytest.raises(RuntimeError) as caught:
            await asyncio.to_thread(next, iter(()))
        assert isinstance(caught.value.__cause__, StopIteration)
        assert await asyncio.to_thread(next, iter(()), "default") == "default"

    assert run(tokenizer, in_main_thread, {"body": handles})["body"].status == "ok"


def test_async_judge_that_raises_after_an_await_fails_its_episode(tokenizer: Any, in_main_thread: bool):
    async def judges(throws: Callable[[], Any]) -> None:
        await asyncio.sleep(0.01)
        throws()

    judge_of = {name: partial(judges, throws) for name, throws in THROWERS.items()}
    for name, episode in run(tokenizer, in_main_thread, {}, judge_of).items():
        assert "AsyncJudge raised " in (episode.error or "")
        if name == "CancelledError":  # asyncio replaces it, without its traceback
            assert (episode.status, episode.error_kind, episode.reward) == ("failed", "judge", None)
        else:
            check_failed(episode, "judge")


def test_async_judge_that_runs_at_its_timeout_fails_its_episode(tokenizer: Any, in_main_thread: bool):
    async def waits() -> None:
        await asyncio.sleep(600)

    async def raises_when_cancelled() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            sys.exit("late")

    async def ignores_its_cancellation() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    async def leaves_a_task_that_raises() -> None:
        kept.append(asyncio.create_task(raises_when_cancelled()))
        await asyncio.sleep(600)

    async def waits_in_an_executor() -> None:
        await asyncio.to_thread(threading.Event().wait, 600)

    cases = [waits, raises_when_cancelled, ignores_its_cancellation, leaves_a_task_that_raises, waits_in_an_executor]
    judges = {case.__name__: case for case in cases}
    for name, episode in run(tokenizer, in_main_thread, {}, judges, judge_timeout=2.0).items():
        assert (episode.status, episode.error_kind, episode.reward, episode.samples) == ("failed", "timeout", None, ())
        assert len(episode.calls) == 1
        assert f"AsyncJudge took longer than 2 s for episode {episode.episode_id}" in (episode.error or "")
        assert name in episode.episode_id


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


async def stops_the_loop_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
    await asyncio.sleep(0.01)


async def closes_the_loop() -> None:
    asyncio.get_running_loop().close()


async def handles_a_signal() -> None:
    asyncio.get_running_loop().add_signal_handler(2, print)


async def interrupts_the_main_thread() -> None:
    _thread.interrupt_main()


async def interrupts_the_main_thread_from_a_timer() -> None:
    timer = threading.Timer(0.01, _thread.interrupt_main)
    timer.start()
    timer.join()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (stops_the_loop, "an episode must not stop its event loop"),
        (stops_the_loop_in_a_callback, "an episode must not stop its event loop"),
        (closes_the_loop, "an episode must not close its event loop"),
        (handles_a_signal, "an episode cannot handle signals"),
        (interrupts_the_main_thread, "an episode must not interrupt the main thread"),
        (interrupts_the_main_thread_from_a_timer, "an episode must not interrupt the main thread"),
    ],
)
def test_an_episode_cannot_change_its_loop(tokenizer: Any, in_main_thread: bool, body: Any, says: str):
    episode = run(tokenizer, in_main_thread, {"body": body})["body"]
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert says in (episode.error or "")


@pytest.mark.parametrize("error", [None, SystemExit(3), KeyboardInterrupt()])
def test_a_fork_that_returns_from_its_episode_does_not_continue_the_run(
    tokenizer: Any, in_main_thread: bool, error: BaseException | None, tmp_path: Path
):
    forks: list[int] = []

    async def returns_twice() -> None:
        if pid := os.fork():
            forks.append(pid)
            await asyncio.sleep(0.5)
        elif error is not None:
            raise error

    episode = run(tokenizer, in_main_thread, {"returns twice": returns_twice})["returns twice"]
    (tmp_path / str(os.getpid())).touch()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    assert episode.status == "ok"
    assert not psutil.pid_exists(forks[0]) or psutil.Process(forks[0]).status() == psutil.STATUS_ZOMBIE


async def stops_behind_the_back_of_the_loop() -> None:
    asyncio.BaseEventLoop.stop(asyncio.get_running_loop())  # type: ignore[arg-type]
    await asyncio.sleep(0.01)


async def cancels_itself_and_returns() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def handles_the_exit_of_a_tool() -> None:
    with contextlib.suppress(SystemExit):
        await asyncio.wait_for(in_coroutine(thrower(SystemExit(2))), 5)
    with contextlib.suppress(KeyboardInterrupt):
        await asyncio.create_task(in_coroutine(thrower(KeyboardInterrupt())))
    assert isinstance((await asyncio.gather(in_coroutine(sys.exit), return_exceptions=True))[0], SystemExit)


@pytest.mark.parametrize(
    "body", [stops_behind_the_back_of_the_loop, cancels_itself_and_returns, handles_the_exit_of_a_tool]
)
@pytest.mark.parametrize("is_judged", [True, False])
def test_an_episode_that_handles_it_succeeds(tokenizer: Any, in_main_thread: bool, body: Any, is_judged: bool):
    judges = {"body": lambda: (0.5, True)} if is_judged else None
    episode = run(tokenizer, in_main_thread, {"body": body}, judges)["body"]
    assert (episode.status, episode.error, episode.reward) == ("ok", None, 0.5 if is_judged else 1.0)


def test_broken_selector_fails_its_episode(tokenizer: Any, in_main_thread: bool):
    async def breaks_the_selector() -> None:
        asyncio.get_running_loop()._selector.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)

    episode = run(tokenizer, in_main_thread, {"body": breaks_the_selector})["body"]
    assert episode.status == "failed"
    assert len(episode.calls) == 1


class Hostile(BaseException):
    """An exception of whose methods and attributes none can be used."""

    __traceback__ = None  # type: ignore[assignment]
    __cause__ = property(lambda self: sys.exit(1))  # type: ignore[assignment]
    __notes__ = property(lambda self: sys.exit(1))  # type: ignore[assignment]
    __class__ = property(lambda self: sys.exit(1))  # type: ignore[assignment]

    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __len__ = __bool__ = __reduce__ = __eq__ = __hash__ = __str__  # type: ignore[assignment]


def huge() -> BaseException:
    return ValueError("x" * 5_000_000)


def cyclic() -> BaseException:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    return first


def nested_group() -> BaseException:
    group: Exception = ValueError("innermost")
    for _ in range(3000):
        group = ExceptionGroup("group", [group])
    return group


def recursive_message() -> BaseException:
    class Recursive(Exception):
        def __str__(self) -> str:
            return str(self)

    return Recursive()


def text_subclass() -> BaseException:
    class Text(str):
        __slots__ = ()

        def __len__(self) -> int:
            raise SystemExit

        __getitem__ = __str__ = __format__ = __len__  # type: ignore[assignment]

    class Odd(Exception):
        def __str__(self) -> str:
            return Text("odd")

    return Odd()


@pytest.mark.parametrize("where", [directly, in_wait_for, in_forgotten_task, in_call_soon, in_thread, "judge"])
def test_exceptions_that_are_hard_to_show(tokenizer: Any, in_main_thread: bool, where: Any):
    makers = [Hostile, huge, cyclic, nested_group, recursive_message, text_subclass]
    throwers = {make.__name__: thrower(make()) for make in makers}
    if where == "judge":
        episodes = run(tokenizer, in_main_thread, {}, throwers)
    else:
        episodes = run(tokenizer, in_main_thread, {name: partial(where, throws) for name, throws in throwers.items()})
    for episode in episodes.values():
        assert (episode.status, episode.reward) == ("failed", None)
        assert 0 < len(episode.error or "") < 5000
        assert 0 < len(episode.error_traceback or "") < 30_000
        assert type(episode.error) is str


def test_reference_cycle_of_an_episode_fails_no_other(tokenizer: Any):
    """Its finaliser runs in a garbage collection, in whichever thread triggers it."""
    import gc

    class Cyclic:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            raise ValueError("late")

    async def leaves_a_cycle() -> None:
        Cyclic()

    async def collects() -> None:
        gc.collect()

    hook, reported = sys.unraisablehook, []
    sys.unraisablehook = lambda args: reported.append(str(args.exc_value))
    try:
        bodies = {"1": leaves_a_cycle, "2": collects}
        assert {episode.status for episode in run(tokenizer, False, bodies).values()} == {"ok"}
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert reported == ["late"]
    assert threading.Thread.start.__module__ == "threading"  # the hooks are removed after a batch


def test_threads_of_an_episode_do_not_keep_the_process_alive():
    code = """
import asyncio, concurrent.futures, threading, time
from astuner.task_rollout.pool import EpisodePool

async def episode():
    threading.Thread(target=time.sleep, args=(600,)).start()
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 600)
    await asyncio.wait_for(asyncio.to_thread(time.sleep, 600), 0.2)

pool = EpisodePool(1, 60.0)
((_, result),) = pool.run([episode])
pool.close()
print(result.uncaught[0].text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("TimeoutError")
