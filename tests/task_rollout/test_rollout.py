"""TaskRollout: concurrency, isolation, retries, seeds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.llm_engine.scripted import ScriptedEngine
from astuner.model_tuner import CallSettings, ChatCodec, ModelTuner
from astuner.schema import Episode, Task
from astuner.task_rollout import BatchRequest, TaskRollout
from astuner.task_rollout import pool as pool_module
from astuner.task_runner import TaskRunner

TASKS = [Task(f"t{i}", f"question {i}") for i in range(5)]
attempts: Counter[str] = Counter()
running = threading.Semaphore(1000)
most_at_once: list[int] = []
lock = threading.Lock()


class Blocking(Workflow):
    """Uses synchronous code, as much of the world does."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        with lock:
            most_at_once.append(most_at_once[-1] + 1 if most_at_once else 1)
        time.sleep(0.05)
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        with lock:
            most_at_once.append(most_at_once[-1] - 1)
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
        if workflow_task.task_id == "t2":
            time.sleep(3)  # blocks its thread: no asyncio deadline can end it
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        return WorkflowOutput(reward=1.0)


def rollout(tokenizer: Any, workflow: type[Workflow], **changes: Any) -> TaskRollout:
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    timeouts = {"episode_timeout": changes.pop("episode_timeout", 5.0), "judge_timeout": 0.1}
    runner = TaskRunner(workflow, None, engine, ChatCodec(tokenizer, "qwen3"), **timeouts)
    return TaskRollout(runner, **changes)


def request(**changes: Any) -> BatchRequest:
    values: dict[str, Any] = {"tasks": TASKS, "repeats": 2, "split": "train", "step": 3, "seed": 1}
    return BatchRequest(**(values | {"settings": CallSettings()} | changes))


def test_episodes_come_back_in_order_with_unique_ids(tokenizer: Any):
    seen: list[Episode] = []
    rolling = rollout(tokenizer, Blocking, workers=4, on_episode=seen.append)
    most_at_once.clear()
    began = time.monotonic()
    episodes = rolling.run(request())
    assert [(e.task.task_id, e.repeat_index) for e in episodes] == [(t.task_id, r) for t in TASKS for r in range(2)]
    assert len({e.episode_id for e in episodes}) == len(seen) == 10
    assert max(most_at_once) == 4
    assert time.monotonic() - began < 10 * 0.05 * 4  # blocking episodes ran beside one another
    again = rolling.run(request(step=4))
    assert not {e.episode_id for e in episodes} & {e.episode_id for e in again}
    rolling.close()


def test_failed_episodes_are_run_again_when_asked(tokenizer: Any, log: list[str]):
    attempts.clear()
    seen: list[Episode] = []
    rolling = rollout(tokenizer, FailsOnce, workers=4, max_retries=1, on_episode=seen.append)
    episodes = rolling.run(request())
    assert Counter(e.status for e in episodes) == {"ok": 10, "failed": 2}  # no attempt is lost
    assert [e.episode_id for e in episodes if e.status == "failed"] == ["train-000003-t1-0", "train-000003-t1-1"]
    assert len(seen) == 10
    assert attempts == {f"t{i}-{r}": 2 if i == 1 else 1 for i in range(5) for r in range(2)}
    assert [e.episode_id for e in episodes if "#" in e.episode_id] == ["train-000003-t1-0#2", "train-000003-t1-1#2"]
    assert any("running 2 failed episodes again" in line for line in log)
    rolling.close()


def test_failures_are_said_with_their_first_reason(tokenizer: Any, log: list[str]):
    attempts.clear()
    rolling = rollout(tokenizer, FailsOnce, workers=4)
    episodes = rolling.run(request())
    assert [e.status for e in episodes].count("failed") == 2
    assert any("2 of 10 episodes are left out (2 workflow); the first: ConnectionError: flaky" in line for line in log)
    rolling.close()


def test_an_episode_that_blocks_its_thread_is_given_up(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_GRACE_SECONDS", 0.2)
    rolling = rollout(tokenizer, NeverReturns, workers=2, episode_timeout=0.5)
    began = time.monotonic()
    episodes = rolling.run(request(repeats=1))
    assert time.monotonic() - began < 2.9
    stuck = episodes[2]
    assert [e.status for e in episodes] == ["ok", "ok", "failed", "ok", "ok"]
    assert stuck.error_kind == "timeout"
    assert "time.sleep(3)" in (stuck.error or "")
    assert {e.status for e in rolling.run(request(tasks=TASKS[:2], step=4))} == {"ok"}
    rolling.close()


def test_seeds_depend_on_run_step_task_and_repeat(tokenizer: Any):
    seeds: set[int | None] = set()
    engine = ScriptedEngine(lambda prompt, params: seeds.add(params.seed) or [1], max_model_len=4096)  # type: ignore[func-returns-value]
    rolling = TaskRollout(TaskRunner(FailsOnce, None, engine, ChatCodec(tokenizer, "qwen3")), workers=2)
    attempts.update({f"t1-{r}": 1 for r in range(2)})
    for changes in ({}, {"step": 4}, {"seed": 2}, {"split": "val"}):
        rolling.run(request(**changes))
    assert len(seeds) == 4 * 10
    rolling.run(request())
    assert len(seeds) == 4 * 10
    rolling.close()


def test_what_waits_when_a_batch_is_interrupted_is_never_begun(tokenizer: Any):
    def interrupt(_: Episode) -> None:
        raise KeyboardInterrupt

    rolling = rollout(tokenizer, Blocking, workers=1, on_episode=interrupt)
    most_at_once.clear()
    with pytest.raises(KeyboardInterrupt):
        rolling.run(request())
    rolling.close()
    time.sleep(0.3)  # ten episodes take 0.5 s, one after the other
    assert len(most_at_once) <= 2 * 2  # an entry at the beginning of an episode and one at its end
