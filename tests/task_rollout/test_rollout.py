"""TaskRollout in one process: order, retries, seeds, signals, late episodes."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from bdb import BdbQuit
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from loguru import logger

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Completion, Episode, SamplingParams, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine

TASKS = [Task(f"t{i}", f"question {i}") for i in range(5)]
attempts: Counter[str] = Counter()
entered, release = threading.Event(), threading.Event()


class Answers(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=float(workflow_task.repeat_index))


class FailsOnce(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        name = f"{workflow_task.task_id}-{workflow_task.repeat_index}"
        attempts[name] += 1
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        if attempts[name] == 1 and workflow_task.task_id == "t1":
            raise ConnectionError("flaky")
        return WorkflowOutput(reward=1.0)


class NeverReturns(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        entered.set()
        release.wait(60)  # blocks its thread: no asyncio deadline can end it
        return WorkflowOutput(reward=1.0)


@pytest.fixture
def log_file() -> Iterator[list[str]]:
    """Log messages of all levels, as in run.log."""
    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(message.record["message"]), level="DEBUG")
    yield messages
    logger.remove(sink)


def rollout(tokenizer: Any, workflow: type[Workflow], **changes: Any) -> TaskRollout:
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    timeouts = {
        "episode_timeout": changes.pop("episode_timeout", 5.0),
        "judge_timeout": changes.pop("judge_timeout", 0.1),
    }
    runner = TaskRunner(workflow, None, engine, ChatCodec(tokenizer, "qwen3"), **timeouts)
    return TaskRollout(EpisodesHere(runner), **changes)


def request(**changes: Any) -> BatchRequest:
    values: dict[str, Any] = {"tasks": TASKS, "repeats": 2, "split": "train", "step": 3, "seed": 1}
    return BatchRequest(**(values | {"settings": CallSettings()} | changes))


def test_episodes_are_returned_in_order_with_unique_ids(tokenizer: Any):
    finished: list[Episode] = []
    rolling = rollout(tokenizer, Answers)
    episodes = rolling.run(request(), finished.append)
    assert [(e.task.task_id, e.repeat_index) for e in episodes] == [(t.task_id, r) for t in TASKS for r in range(2)]
    assert len({e.episode_id for e in episodes}) == len(finished) == 10
    again = rolling.run(request(step=4))
    assert not {e.episode_id for e in episodes} & {e.episode_id for e in again}
    rolling.close()


def test_failed_episodes_are_retried(tokenizer: Any, log: list[str]):
    attempts.clear()
    finished: list[Episode] = []
    rolling = rollout(tokenizer, FailsOnce, max_retries=1)
    episodes = rolling.run(request(), finished.append)
    assert Counter(e.status for e in episodes) == {"ok": 10, "failed": 2}  # no attempt is lost
    assert [e.episode_id for e in episodes if e.status == "failed"] == ["train-000003-t1-0", "train-000003-t1-1"]
    assert len(finished) == 10
    assert attempts == {f"t{i}-{r}": 2 if i == 1 else 1 for i in range(5) for r in range(2)}
    assert [e.episode_id for e in episodes if "#" in e.episode_id] == ["train-000003-t1-0#2", "train-000003-t1-1#2"]
    assert any("retrying 2 failed episodes" in line for line in log)
    rolling.close()


def test_failures_are_logged_with_the_first_reason(tokenizer: Any, log: list[str]):
    attempts.clear()
    rolling = rollout(tokenizer, FailsOnce)
    episodes = rolling.run(request())
    assert [e.status for e in episodes].count("failed") == 2
    assert any("2 of 10 episodes are left out: [workflow] ConnectionError: flaky" in line for line in log)
    rolling.close()


def test_an_episode_that_blocks_its_thread_is_abandoned_from_another(tokenizer: Any):
    rolling = rollout(tokenizer, NeverReturns)
    here = rolling.executor
    assert isinstance(here, EpisodesHere)
    assert here.abandon_episode() is None
    task = WorkflowTask(TASKS[2], episode_id="train-000003-t2-0", repeat_index=0, seed=1)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(here.run_episode, task, CallSettings())
        assert entered.wait(60)
        abandoned = here.abandon_episode()
        release.set()
        assert running.result(60).status == "ok"
    assert abandoned is not None
    assert (abandoned.status, abandoned.error_kind, len(abandoned.calls)) == ("failed", "timeout", 1)
    assert "blocked its thread for 0 s and was abandoned; it was at" in str(abandoned.error)
    assert "release.wait(60)" in str(abandoned.error)
    rolling.close()


def test_seeds_depend_on_run_step_task_and_repeat(tokenizer: Any):
    seeds: set[int | None] = set()
    engine = ScriptedEngine(lambda prompt, params: seeds.add(params.seed) or [1], max_model_len=4096)  # type: ignore[func-returns-value]
    rolling = TaskRollout(EpisodesHere(TaskRunner(FailsOnce, None, engine, ChatCodec(tokenizer, "qwen3"))))
    attempts.update({f"t1-{r}": 1 for r in range(2)})
    for changes in ({}, {"step": 4}, {"seed": 2}, {"split": "val"}):
        rolling.run(request(**changes))
    assert len(seeds) == 4 * 10
    rolling.run(request())
    assert len(seeds) == 4 * 10
    rolling.close()


class WhereItRuns(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        in_main_thread = threading.current_thread() is threading.main_thread()
        return WorkflowOutput(reward=float(in_main_thread))


def test_the_main_thread_runs_one_episode_after_another(tokenizer: Any):
    rolling = rollout(tokenizer, WhereItRuns)
    before = set(threading.enumerate())
    assert [episode.reward for episode in rolling.run(request())] == [1.0] * 10
    assert set(threading.enumerate()) <= before
    rolling.close()


class InterruptedByHand(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        signal.raise_signal(signal.SIGINT)
        return WorkflowOutput(reward=1.0)


def test_ctrl_c_in_the_main_thread_ends_the_run_and_not_the_episode(tokenizer: Any):
    with pytest.raises(KeyboardInterrupt):
        rollout(tokenizer, InterruptedByHand).run(request())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class QuitsTheDebugger(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        raise BdbQuit


def test_quitting_the_debugger_ends_the_run(tokenizer: Any):
    with pytest.raises(KeyboardInterrupt):
        rollout(tokenizer, QuitsTheDebugger).run(request())


class Hangs(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        await asyncio.gather(self.part_of_it())
        return WorkflowOutput(reward=1.0)

    async def part_of_it(self) -> None:
        await asyncio.sleep(60)


def test_late_episode_logs_its_name_last_call_and_stack(tokenizer: Any, log_file: list[str]):
    rollout(tokenizer, Hangs, episode_timeout=2.0).run(request(tasks=TASKS[:1], repeats=1))
    (text,) = [message for message in log_file if "its stack:" in message]
    assert text.startswith("episode train-000003-t0-0: the workflow took longer than rollout.episode_timeout (2 s)")
    assert "; last finished LLM call train-000003-t0-0/0 (model default, " in text
    assert re.search(r" prompt tokens, \d+\.", text)
    assert "await asyncio.gather(self.part_of_it())" in text


def test_report_lists_the_running_episodes(tokenizer: Any):
    rolling = rollout(tokenizer, Hangs, episode_timeout=3.0)
    assert rolling.running.report() == "0 episodes running"
    runs = threading.Thread(target=lambda: rolling.run(request(tasks=TASKS[:1], repeats=1)))
    runs.start()
    deadline = time.monotonic() + 10
    called = "last finished LLM call train-000003-t0-0/0 ("
    while time.monotonic() < deadline:
        report = rolling.running.report()
        if "await asyncio.sleep(60)" in report and called in report:
            break
        time.sleep(0.01)
    runs.join()
    assert report.startswith("1 episode running\n")
    assert "train-000003-t0-0: for " in report
    assert called in report
    assert "await asyncio.gather(self.part_of_it())" in report
    assert "await asyncio.sleep(60)" in report
    assert rolling.running.report() == "0 episodes running"


class BlocksAWhile(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        time.sleep(0.8)
        return WorkflowOutput(reward=1.0)


def test_late_episode_in_the_main_thread_is_logged(tokenizer: Any, log: list[str]):
    rolling = rollout(tokenizer, BlocksAWhile, episode_timeout=0.2)
    rolling.run(request(tasks=TASKS[:1], repeats=1))
    (text,) = [message for message in log if "it blocks its thread, which only Ctrl-C ends" in message]
    assert text.startswith("episode train-000003-t0-0: the workflow took longer than rollout.episode_timeout (0.2 s)")
    assert "no LLM call finished" in text
    assert "time.sleep(0.8)" in text


def test_blocked_thread_is_logged_at_the_workflows_deadline(tokenizer: Any, log: list[str]):
    here = rollout(tokenizer, BlocksAWhile, episode_timeout=0.1, judge_timeout=1000).executor
    assert isinstance(here, EpisodesHere)
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a worker process
    try:
        task = WorkflowTask(TASKS[0], episode_id="train-000003-t0-0", repeat_index=0, seed=1)
        late = here.run_episode(task, CallSettings())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (late.status, late.error_kind, late.reward) == ("failed", "timeout", None)
    (text,) = [message for message in log if "it blocks its thread" in message]
    assert text.startswith("episode train-000003-t0-0: the workflow took longer than rollout.episode_timeout (0.1 s)")
    assert "; no LLM call finished; it blocks its thread; its stack:\n" in text
    assert "time.sleep(0.8)" in text


class NeverAnswers(ScriptedEngine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        await asyncio.sleep(60)
        return await super().generate(prompt_ids, params)


class HasTheModelHang(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}], agent_name="solver")
        return WorkflowOutput(reward=1.0)


def test_open_call_is_logged_at_the_deadline(tokenizer: Any, log_file: list[str]):
    rolling = rollout(tokenizer, HasTheModelHang, episode_timeout=0.2)
    rolling.executor.engine = NeverAnswers(lambda prompt, params: (), max_model_len=4096)
    rolling.run(request(tasks=TASKS[:1], repeats=1))
    (text,) = [message for message in log_file if "its stack:" in message]
    assert "no LLM call finished, open LLM call (model default for solver, " in text
    assert re.search(r" prompt tokens, started \d+\.", text)


class Unscored(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        return WorkflowOutput()


class PlainAndSlow(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        time.sleep(0.4)
        return 1.0


class AsyncAndBlocking(BaseJudge):
    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        time.sleep(0.8)
        return 1.0


@pytest.mark.parametrize(
    ("judge", "in_place", "line", "holds"),
    [
        (PlainAndSlow, False, "time.sleep(0.4)", False),
        (AsyncAndBlocking, False, "time.sleep(0.8)", True),
        (AsyncAndBlocking, True, "time.sleep(0.8)", True),
    ],
)
def test_late_judge_logs_one_textwith_everything(
    tokenizer: Any, log_file: list[str], judge: type[BaseJudge], in_place: bool, line: str, holds: bool
):
    rolling = rollout(tokenizer, Unscored, judge_timeout=0.1)
    here = rolling.executor
    assert isinstance(here, EpisodesHere)
    here.runner = replace(here.runner, judge=judge(TaskJudgeConfig()), judge_inline=in_place)
    rolling.run(request(tasks=TASKS[:1], repeats=1))
    (text,) = [message for message in log_file if "its stack:" in message]
    assert text.startswith(f"judge {judge.__name__} took longer than 0.1 s for episode train-000003-t0-0; ")
    assert "last finished LLM call train-000003-t0-0/0 (model default, " in text
    assert ("it blocks its thread" in text) == holds
    assert line in text
