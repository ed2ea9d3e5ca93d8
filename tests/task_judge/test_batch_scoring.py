"""Scoring of many episodes in one thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.errors import EpisodeTimeout, UnscoredError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.batch_scoring import score_batch
from astuner.task_judge.judge_base import BaseJudge


class Uneven(BaseJudge):
    """Blocks, raises, awaits or returns a reward, as the episode says."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__(TaskJudgeConfig())
        self.release = release
        self.calls: list[str] = []

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        self.calls.append(workflow_task.episode_id)
        if workflow_task.episode_id.startswith("blocks"):
            self.release.wait(60)
        if workflow_task.episode_id == "raises":
            raise ValueError("no answer")
        if workflow_task.episode_id == "unscored":
            raise UnscoredError("busy", "rate_limit")
        return self.later() if workflow_task.episode_id.endswith("awaits") else 0.5

    async def later(self) -> float:
        await asyncio.sleep(0)
        return 2.0


def test_a_batch_has_a_result_for_each_episode():
    names = ["a", "raises", "awaits", "blocks", "unscored", "b"]
    judge = Uneven(release := threading.Event())
    pairs = [(WorkflowTask(Task("t", "q"), name), WorkflowOutput()) for name in names]
    try:
        results = asyncio.run(score_batch(judge, pairs, 5))
    finally:
        release.set()
    kinds = [result.reward if isinstance(result, Judgement) else result.kind for result in results]
    assert kinds == [0.5, "judge", 2.0, "timeout", "unscored/rate_limit", 0.5]
    assert "took longer than 5 s for episode blocks" in str(results[3])
    assert "raised ValueError: no answer" in str(results[1])
    assert asyncio.run(score_batch(judge, [], 1.0)) == []


def test_the_thread_of_a_late_judge_ends_after_the_late_call(recwarn: pytest.WarningsRecorder):
    judge = Uneven(release := threading.Event())
    pairs = [(WorkflowTask(Task("t", "q"), name), WorkflowOutput()) for name in ("blocks and awaits", "awaits")]
    before = set(threading.enumerate())
    results = asyncio.run(score_batch(judge, pairs, 2))
    assert isinstance(results[0], EpisodeTimeout)
    assert results[1] == Judgement(2.0, True)
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    gc.collect()
    assert judge.calls == ["blocks and awaits", "awaits"]
    assert not recwarn.list
