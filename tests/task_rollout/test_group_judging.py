"""Judges that score all episodes of a task together."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeBudgetError, UnscoredError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Episode, Judgement, Task
from astuner.task_judge.judge_base import BaseGroupJudge
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine

TASKS = [Task(f"t{i}", f"question {i}") for i in range(3)]


class Numbered(Workflow):
    """Answers with the repeat index; the second episode of t1 fails, and the first of t2 has a reward already."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        name = f"{workflow_task.task_id}-{workflow_task.repeat_index}"
        if name == "t1-1":
            raise ConnectionError("always")
        reward = 9.0 if name == "t2-0" else None
        return WorkflowOutput(reward=reward, metadata={"final_answer": workflow_task.repeat_index})


class Ranks(BaseGroupJudge):
    """The reward is the answer's rank in its group; a single episode has 100."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        super().__init__(TaskJudgeConfig())
        self.error, self.seconds = error, seconds
        self.groups: list[tuple[str, list[int]]] = []
        self.threads: set[int] = set()

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        self.groups.append((workflow_task.task_id, [workflow_output.metadata["final_answer"]]))
        return 100.0, True

    def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[tuple[float, bool]]:
        answers = [output.metadata["final_answer"] for output in workflow_outputs]
        self.groups.append((workflow_task.task_id, answers))
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        assert all(len(output.calls) == 1 for output in workflow_outputs)
        return [(float(sorted(answers).index(answer)), True) for answer in answers]


class AsyncRanks(Ranks):
    async def compute_group_rewards(  # type: ignore[override]
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[Judgement]:
        await asyncio.sleep(self.seconds)
        return [Judgement(unscored_cause="tired"), *(Judgement(1.0) for _ in workflow_outputs[1:])]


class TooFew(Ranks):
    def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[tuple[float, bool]]:
        return [(1.0, True)]


def run(tokenizer: Any, judge: Ranks, repeats: int = 3, *, inline: bool = False, **settings: Any) -> list[Episode]:
    engine = ScriptedEngine(lambda *_: tokenizer.encode("ok<|im_end|>", add_special_tokens=False), max_model_len=512)
    runner = TaskRunner(Numbered, judge, engine, ChatCodec(tokenizer, "qwen3"), judge_inline=inline, **settings)
    rollout = TaskRollout(EpisodesHere(runner), max_retries=1)
    ended: list[Episode] = []
    attempts: list[Episode] = []
    try:
        request = BatchRequest(TASKS, repeats, "train", 1, 0, CallSettings())
        episodes = rollout.run(request, ended.append, attempts.append)
    finally:
        rollout.close()
    assert sorted(e.episode_id for e in attempts) == sorted(e.episode_id for e in episodes)
    assert len(ended) == len(TASKS) * repeats
    return episodes


def rewards(episodes: Sequence[Episode]) -> dict[str, float | str | None]:
    return {
        e.episode_id.removeprefix("train-000001-"): e.reward if e.reward is not None else e.error_kind for e in episodes
    }


@pytest.mark.parametrize("inline", [False, True])
def test_a_group_is_judged_when_all_of_its_episodes_have_ended(tokenizer: Any, inline: bool):
    judge = Ranks()
    episodes = run(tokenizer, judge, inline=inline)
    assert rewards(episodes) == {
        "t0-0": 0.0, "t0-1": 1.0, "t0-2": 2.0,
        "t1-0": 0.0, "t1-1": "workflow", "t1-1#2": "workflow", "t1-2": 1.0,
        "t2-0": 9.0, "t2-1": 0.0, "t2-2": 1.0,
    }  # fmt: skip
    assert sorted(judge.groups) == [("t0", [0, 1, 2]), ("t1", [0, 2]), ("t2", [1, 2])]
    assert all(episode.samples for episode in episodes if episode.status == "ok")
    assert (judge.threads == {threading.get_ident()}) == inline


def test_a_group_of_one_is_judged_like_a_single_episode(tokenizer: Any):
    judge = Ranks()
    assert rewards(run(tokenizer, judge, repeats=1)) == {"t0-0": 100.0, "t1-0": 100.0, "t2-0": 9.0}
    assert sorted(judge.groups) == [("t0", [0]), ("t1", [0])]


@pytest.mark.parametrize(
    ("judge", "kind", "text"),
    [
        (Ranks(ValueError("broken")), "judge", r"judge Ranks raised ValueError: broken \(at .*test_group_judging"),
        (Ranks(UnscoredError("no answer", "llm")), "unscored/llm", "no answer"),
        (Ranks(JudgeBudgetError("too expensive")), "judge_budget", "too expensive"),
        (TooFew(), "judge", "expected a list with one result per episode"),
    ],
)
def test_a_fault_of_the_judge_fails_the_episodes_of_the_group(tokenizer: Any, judge: Ranks, kind: str, text: str):
    episodes = [episode for episode in run(tokenizer, judge) if episode.task.task_id == "t0"]
    assert [(e.status, e.error_kind, e.reward) for e in episodes] == [("failed", kind, None)] * 3
    assert re.search(text, episodes[0].error or "")


def test_an_async_judge_may_leave_episodes_of_a_group_unscored(tokenizer: Any):
    episodes = [e for e in run(tokenizer, AsyncRanks()) if e.task.task_id == "t0"]
    assert [(e.status, e.error_kind) for e in episodes] == [("failed", "unscored/tired"), ("ok", None), ("ok", None)]


def test_a_late_judge_fails_the_group(tokenizer: Any):
    episodes = run(tokenizer, AsyncRanks(seconds=60.0), judge_timeout=0.05)
    assert {e.error_kind for e in episodes if e.task.task_id == "t0"} == {"timeout"}
