"""Scoring: sync and async judges, timeouts, and checked results."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import pickle
import subprocess
import sys
import threading
import time
from bdb import BdbQuit
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from astuner.config.data import TaskJudgeConfig
from astuner.errors import EpisodeTimeout, JudgeError, UnscoredError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.scoring import score

TASK = WorkflowTask(Task("t", "1+1?", metadata={"answer": "2"}), episode_id="e-1")
OUTPUT = WorkflowOutput(metadata={"final_answer": "2"})


def sync_judge(body: Callable[[], Any]) -> BaseJudge:
    class Sync(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            assert (workflow_task, workflow_output) == (TASK, OUTPUT)
            return body()

    return Sync(TaskJudgeConfig())


def async_judge(body: Callable[[], Any]) -> BaseJudge:
    class Async(BaseJudge):
        async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            assert (workflow_task, workflow_output) == (TASK, OUTPUT)
            result = body()
            return await result if asyncio.iscoroutine(result) else result

    return Async(TaskJudgeConfig())


both = pytest.mark.parametrize("make", [sync_judge, async_judge])
Make = Callable[[Callable[[], Any]], BaseJudge]


@both
@pytest.mark.parametrize(
    ("answer", "scored"),
    [
        ((0.5, True), (0.5, True)),
        ([1, False], (1.0, False)),
        (0.3, (0.3, True)),
        (0, (0.0, False)),
        (-1, (-1.0, False)),
        (True, (1.0, True)),
        ((np.float32(0.5), np.bool_(False)), (0.5, False)),
        ((np.int64(1), True), (1.0, True)),
        (np.array([0.5]), (0.5, True)),
        (torch.tensor(0.25), (0.25, True)),
        ((Fraction(1, 4), True), (0.25, True)),
        (Decimal("0.5"), (0.5, True)),
    ],
)
async def test_accepted_results_of_a_judge(make: Make, answer: Any, scored: tuple[float, bool]) -> None:
    result = await score(make(lambda: answer), TASK, OUTPUT, timeout=10)
    assert (result.reward, result.is_success) == scored
    assert (type(result.reward), type(result.is_success)) == (float, bool)


@both
async def test_a_judge_may_reward_agents_by_name(make: Make) -> None:
    result = await score(make(lambda: ({"white": 1, "black": Fraction(-1, 2)}, True)), TASK, OUTPUT, timeout=10)
    assert (result.reward, result.agent_rewards) == (0.25, {"white": 1.0, "black": -0.5})
    assert result.is_success is True


@both
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (None, "None"),
        ("1.0", "'1.0'"),
        ((1.0,), r"\(1\.0,\)"),
        ((1.0, True, "why"), r"\(1\.0, True, 'why'\)"),
        ((float("nan"), True), "nan"),
        ((float("inf"), True), "inf"),
        ((None, False), "None"),
        ((Fraction(10**400), True), "1000"),
        (Decimal("NaN"), "NaN"),
        (Decimal("sNaN"), "sNaN"),
        (Decimal("1e400"), r"1E\+400"),
        (1j, "1j"),
        ((1.0, 1), "is_success=1"),
        ((1.0, None), "is_success=None"),
        ({"reward": 1}, "reward"),
        (({}, True), "{}"),
        (({"white": float("nan")}, True), "white"),
    ],
)
async def test_wrong_result_is_shown_in_the_error(make: Make, answer: Any, named: str) -> None:
    with pytest.raises(JudgeError, match=rf"(Sync|Async) returned .*{named}.*expected \(reward, is_success\)"):
        await score(make(lambda: answer), TASK, OUTPUT, timeout=10)


@both
async def test_numpy_numbers_of_a_judgement_become_python_numbers(make: Make) -> None:
    answer = Judgement(
        reward=np.float32(0.5),
        components={"correct": Fraction(1, 2), 1: True},
        explanation="half",
        metadata={"by": "me"},
        metrics={"tokens": np.int64(7)},
    )
    result = await score(make(lambda: answer), TASK, OUTPUT, timeout=10)
    assert result == Judgement(
        0.5, True, {"correct": 0.5, "1": 1.0}, explanation="half", metadata={"by": "me"}, metrics={"tokens": 7.0}
    )
    assert {type(value) for value in result.components.values()} == {float}


@both
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Judgement(agent_rewards={"a": 1, "b": 0}), (0.5, True)),
        (Judgement(reward=0.5, agent_rewards={"a": 1, "b": 0}), (0.5, True)),
        (Judgement(call_rewards=[1, -1], is_success=True), (0.0, True)),
        (Judgement(reward=0.0), (0.0, False)),
        (Judgement(is_success=True, explanation="no answer", unscored_cause="late"), (None, None)),
    ],
)
async def test_reward_of_a_judgement(make: Make, answer: Judgement, expected: tuple[Any, Any]) -> None:
    result = await score(make(lambda: answer), TASK, OUTPUT, timeout=10)
    assert (result.reward, result.is_success) == expected
    assert result.is_scored is (expected[0] is not None)


@both
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (Judgement(reward="1"), "the reward must be a finite number"),
        (Judgement(reward=1.0, components={"format": float("nan")}), r"components\['format'\] must be a finite number"),
        (Judgement(reward=1.0, components=[1]), "components must be a mapping"),
        (Judgement(reward=1.0, is_success=1), "is_success=1 is not a bool"),
        (Judgement(reward=1.0, agent_rewards={"a": 0.0}), "must be the mean 0"),
        (Judgement(agent_rewards={"a": 0.0}, call_rewards=(1.0,)), "not both"),
        (Judgement(call_rewards=(1.0, None)), r"call_rewards\[1\]"),
        (Judgement(reward=1.0, metrics={"cost": None}), r"metrics\['cost'\]"),
    ],
)
async def test_invalid_values_of_a_judgement_are_named(make: Make, answer: Judgement, named: str) -> None:
    with pytest.raises(JudgeError, match=rf"returned Judgement\(.*: .*{named}"):
        await score(make(lambda: answer), TASK, OUTPUT, timeout=10)


@both
async def test_unscored_error_keeps_its_cause(make: Make) -> None:
    def fails() -> None:
        raise UnscoredError("the service answers 429", "rate_limit")

    with pytest.raises(UnscoredError, match="the service answers 429") as caught:
        await score(make(fails), TASK, OUTPUT, timeout=10)
    assert (caught.value.cause, caught.value.kind) == ("rate_limit", "unscored/rate_limit")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.kind) == ("the service answers 429", "unscored/rate_limit")


@both
@pytest.mark.parametrize("error", [KeyError("answer"), TimeoutError("mine"), SystemExit(3)])
async def test_error_of_a_judge_has_its_location(make: Make, error: BaseException) -> None:
    def fails() -> None:
        raise error

    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(JudgeError) as caught:
        await score(make(fails), TASK, OUTPUT, timeout=10)
    assert f"{type(error).__name__}: " in str(caught.value)
    assert str(error) in str(caught.value)
    assert f"(at {__file__}:{line})" in str(caught.value)
    assert caught.value.__cause__ is not None


async def test_stop_iteration_is_an_error() -> None:
    with pytest.raises(JudgeError, match="StopIteration"):
        await score(sync_judge(lambda: next(iter([]))), TASK, OUTPUT, timeout=10)


@both
async def test_judge_error_is_not_wrapped(make: Make) -> None:
    error = JudgeError("no answer in the data")

    def fails() -> None:
        raise error

    with pytest.raises(JudgeError) as caught:
        await score(make(fails), TASK, OUTPUT, timeout=10)
    assert caught.value is error


async def test_judge_that_cancels_itself_is_an_error() -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(JudgeError, match="raised CancelledError"):
        await score(async_judge(cancels), TASK, OUTPUT, timeout=10)


async def test_a_sync_judge_does_not_block_the_loop() -> None:
    thread = threading.current_thread()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    def slow() -> bool:
        time.sleep(0.3)
        return threading.current_thread() is not thread

    ticking = asyncio.create_task(tick())
    results = await asyncio.gather(*[score(sync_judge(slow), TASK, OUTPUT, timeout=10) for _ in range(20)])
    ticking.cancel()
    assert results == [Judgement(1.0, True)] * 20  # all at once, each in a thread
    assert ticks >= 5


async def test_a_sync_judge_sees_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert await score(sync_judge(variable.get), TASK, OUTPUT, timeout=10) == Judgement(7.0, True)


@both
async def test_a_hung_judge_is_a_timeout(make: Make) -> None:
    release = threading.Event()
    ended: list[str] = []

    def blocks() -> None:
        release.wait(60)
        ended.append("blocks")

    async def ignores_cancellation() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        ended.append("ignores_cancellation")
        raise ValueError("too late for anyone to care")

    body: Any = ignores_cancellation if make is async_judge else blocks
    with pytest.raises(EpisodeTimeout, match=r"took longer than 0\.2 s for episode e-1; .*task_judge\.timeout"):
        await score(make(body), TASK, OUTPUT, timeout=0.2)
    assert not ended  # the score did not wait for the judge
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    release.set()
    await asyncio.sleep(0.2)
    gc.collect()
    assert not complaints  # the late error belongs to an episode that is over


async def test_cancelling_the_score_cancels_the_judge() -> None:
    events: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    scoring = asyncio.create_task(score(async_judge(waits), TASK, OUTPUT, timeout=60))
    await asyncio.sleep(0.05)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    await asyncio.sleep(0)
    assert events == ["cancelled"]


def test_hung_judge_does_not_block_the_exit_of_the_interpreter() -> None:
    code = """
import asyncio, time
from astuner.config.data import TaskJudgeConfig
from astuner.errors import EpisodeTimeout
from astuner.schema import Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.scoring import score

class Hangs(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        time.sleep(120)

try:
    asyncio.run(score(Hangs(TaskJudgeConfig()), WorkflowTask(Task("t", "q"), "e"), WorkflowOutput(), 0.2))
except EpisodeTimeout:
    print("timeout")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "timeout"
    assert "judge Hangs took longer than 0.2 s for episode e; its stack:" in done.stderr
    assert "in compute_reward" in done.stderr  # where its thread stood
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("answers_with", [lambda: 0.5, lambda: asyncio.sleep(0, result=0.5)])
def test_a_late_sync_judge_finds_the_loop_closed(
    recwarn: pytest.WarningsRecorder, answers_with: Callable[[], object]
) -> None:
    """Its thread ends silently; an exception in the thread would be a warning, which fails the test."""
    release = threading.Event()

    def judges() -> object:
        release.wait(30)
        return answers_with()

    with pytest.raises(EpisodeTimeout):
        asyncio.run(score(sync_judge(judges), TASK, OUTPUT, timeout=0.05))
    late = [thread for thread in threading.enumerate() if thread.name.startswith("judge ")]
    release.set()
    for thread in late:
        thread.join(10)
    assert late
    gc.collect()
    assert not recwarn.list


async def test_inline_sync_judge_runs_in_the_callers_thread_and_can_run_a_loop() -> None:
    threads: list[threading.Thread] = []

    def judges() -> float:
        threads.append(threading.current_thread())
        return asyncio.run(asyncio.sleep(0, result=0.5))

    assert await score(sync_judge(judges), TASK, OUTPUT, timeout=10, inline=True) == Judgement(0.5, True)
    assert threads == [threading.current_thread()]
    await asyncio.sleep(0)  # the outer loop still is the running one


@both
async def test_inline_errors_and_timeouts(make: Make) -> None:
    def fails() -> None:
        raise KeyError("answer")

    with pytest.raises(JudgeError, match=r"raised KeyError: .*test_scoring\.py:"):
        await score(make(fails), TASK, OUTPUT, timeout=10, inline=True)
    with pytest.raises(JudgeError, match="expected"):
        await score(make(lambda: None), TASK, OUTPUT, timeout=None, inline=True)


async def test_inline_async_judge_has_a_timeout() -> None:
    async def waits() -> None:
        await asyncio.sleep(60)

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(EpisodeTimeout, match=r"took longer than 0\.05 s for episode"):
        await score(async_judge(waits), TASK, OUTPUT, timeout=0.05, inline=True)
    with pytest.raises(JudgeError, match="raised CancelledError"):
        await score(async_judge(cancels), TASK, OUTPUT, timeout=10, inline=True)


@pytest.mark.parametrize("inline", [False, True])
def test_quitting_the_debugger_in_a_judge_ends_the_run(inline: bool) -> None:
    def leaves() -> None:
        raise BdbQuit

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(score(sync_judge(leaves), TASK, OUTPUT, 10, inline=inline))
