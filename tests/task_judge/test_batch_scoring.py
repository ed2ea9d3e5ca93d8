"""Scoring of many episodes in one thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from astuner.config.data import TaskJudgeConfig
from astuner.errors import UnscoredError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.batch_scoring import score_batch
from astuner.task_judge.judge_base import BaseJudge


class Uneven(BaseJudge):
    """Blocks, raises, awaits or returns a reward, as the episode says."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__(TaskJudgeConfig())
        self.release = release

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        if workflow_task.episode_id == "blocks":
            self.release.wait(60)
        if workflow_task.episode_id == "raises":
            raise ValueError("no answer")
        if workflow_task.episode_id == "unscored":
            raise UnscoredError("busy", "rate_limit")
        return self.later() if workflow_task.episode_id == "awaits" else 0.5

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
