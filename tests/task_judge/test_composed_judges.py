"""Weighted and gated judges, alone and nested, from Python and from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError, PluginError, UnscoredError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.composed_judges import GatedJudge, WeightedJudge
from astuner.task_judge.judge_base import BaseJudge, make_judge
from astuner.task_judge.scoring import score

CONFIG = TaskJudgeConfig()
TASK = WorkflowTask(Task("t", "?", metadata={"answer": "4"}), episode_id="e")
MODULE = "astuner.task_judge"
EXACT = {"judge_protocol": f"{MODULE}.exact_answer_as_judge->ExactAnswerAsJudge"}
SHORT = {"judge_protocol": f"{MODULE}.regex_as_judge->RegexAsJudge", "params": {"pattern": r"^.{1,5}$"}}


class Fixed(BaseJudge):
    """Returns or raises a fixed result, and counts its calls."""

    def __init__(self, result: Any) -> None:
        super().__init__(CONFIG)
        self.result, self.calls = result, 0

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class FixedAsync(Fixed):
    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:  # type: ignore[override]
        return Fixed.compute_reward(self, workflow_task, workflow_output)


async def judged(judge: BaseJudge, answer: str = "4") -> Judgement:
    output = WorkflowOutput(metadata={"final_answer": answer})
    result = await score(judge, TASK, output, timeout=30)
    assert await score(judge, TASK, output, timeout=30, inline=True) == result
    return result


async def test_weighted_sum_of_sync_and_async_judges() -> None:
    judges = {
        "a": Fixed((1.0, True)),
        "b": FixedAsync(
            Judgement(0.5, False, {"x": 2.0}, explanation="half", metrics={"tokens": 3.0}, metadata={"k": 1})
        ),
    }
    result = await judged(WeightedJudge(CONFIG, judges=judges, weights={"b": -2.0}))
    assert (result.reward, result.is_success) == (0.0, False)
    assert result.components == {"a": 1.0, "b": 0.5, "b.x": 2.0}
    assert (result.explanation, result.metrics, result.metadata) == ("b: half", {"b.tokens": 3.0}, {"b": {"k": 1}})
    solved = [
        (await judged(WeightedJudge(CONFIG, judges=judges, success=s))).is_success for s in ("all", "any", "a", "b")
    ]
    assert solved == [False, True, True, False]


async def test_rewards_of_agents_and_calls_are_summed() -> None:
    by_agent = Fixed(Judgement(agent_rewards={"x": 1.0, "y": 0.0}))
    result = await judged(WeightedJudge(CONFIG, judges={"a": by_agent, "b": Fixed((0.5, True))}, weights={"b": 2.0}))
    assert (result.reward, result.agent_rewards) == (1.5, {"x": 2.0, "y": 1.0})
    by_call = Fixed(Judgement(call_rewards=(1.0, 0.0, -1.0)))
    result = await judged(WeightedJudge(CONFIG, judges={"a": by_call, "b": Fixed((0.5, True))}))
    assert (result.reward, result.call_rewards) == (0.5, (1.5, 0.5, -0.5))
    with pytest.raises(JudgeError, match="reward agents and calls"):
        await judged(WeightedJudge(CONFIG, judges={"a": by_agent, "b": by_call}))


async def test_the_judge_scores_only_episodes_that_pass_the_gate() -> None:
    judge = Fixed(Judgement(0.7, True, {"x": 0.7}))
    passed = await judged(GatedJudge(CONFIG, gate=Fixed((1.0, True)), judge=judge, failed_reward=-1.0))
    assert (passed.reward, passed.is_success) == (0.7, True)
    assert passed.components == {"gate": 1.0, "judge": 0.7, "judge.x": 0.7}
    calls = judge.calls
    failed = await judged(GatedJudge(CONFIG, gate=Fixed((0.2, False)), judge=judge, failed_reward=-1.0))
    assert (failed.reward, failed.is_success, failed.components) == (-1.0, False, {"gate": 0.2, "judge": -1.0})
    assert judge.calls == calls


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (UnscoredError("busy", "rate_limit"), UnscoredError, "busy"),
        (Judgement(explanation="no vote", unscored_cause="vote"), UnscoredError, "b: no vote"),
        (KeyError("x"), JudgeError, "judge Fixed raised KeyError"),
        ("wrong", JudgeError, "judge Fixed returned 'wrong'"),
    ],
)
async def test_the_composed_judge_fails_if_a_judge_fails_or_cannot_score(
    result: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await judged(WeightedJudge(CONFIG, judges={"a": Fixed((1.0, True)), "b": Fixed(result)}))
    with pytest.raises(error, match=text.replace("b: ", "gate: ")):
        await judged(GatedJudge(CONFIG, gate=Fixed(result), judge=Fixed((1.0, True))))


async def test_nested_judges_of_a_configuration() -> None:
    params = {
        "judges": {
            "correct": {**EXACT, "weight": 0.8},
            "style": {
                "weight": 0.2,
                "judge_protocol": f"{MODULE}.composed_judges->GatedJudge",
                "params": {"gate": SHORT, "judge": EXACT, "failed_reward": -1.0},
            },
        },
        "success": "correct",
    }
    judge = make_judge(f"{MODULE}.composed_judges->WeightedJudge", CONFIG, params)
    right, wrong, long = [await judged(judge, answer) for answer in ("4", "5", "four, I think")]
    assert (right.reward, right.is_success) == (1.0, True)
    assert right.components == {"correct": 1.0, "style": 1.0, "style.gate": 1.0, "style.judge": 1.0}
    assert (wrong.reward, wrong.is_success) == (0.0, False)
    assert (long.reward, long.components["style.gate"]) == (-0.2, 0.0)


async def test_judges_of_the_user_are_found(tmp_path: Path) -> None:
    code = "from astuner.task_judge.judge_base import BaseJudge\nclass Half(BaseJudge):\n"
    code += "    def compute_reward(self, workflow_task, workflow_output):\n        return 0.5, True\n"
    (tmp_path / "half_judge.py").write_text(code)
    params = {"judges": {"half": {"judge_protocol": "half_judge->Half"}}}
    judge = make_judge(f"{MODULE}.composed_judges->WeightedJudge", CONFIG, params, [tmp_path])
    assert (await judged(judge)).reward == 0.5


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("WeightedJudge", {}, "needs judges; it has judges, weights, success"),
        ("WeightedJudge", {"judges": [EXACT]}, "params.judges is .*expected a mapping of names to judges"),
        ("WeightedJudge", {"judges": {}}, "judges is empty"),
        (
            "WeightedJudge",
            {"judges": {"a": {"params": {}}}},
            "params.judges.a is .*judge_protocol: package.module->Class",
        ),
        ("WeightedJudge", {"judges": {"a": EXACT}, "weights": {"a": 1}}, "set `weight` in each entry of judges"),
        (
            "WeightedJudge",
            {"judges": {"a": {**EXACT, "weight": "1"}}},
            "params.judges.a.weight is '1'; expected a number",
        ),
        ("WeightedJudge", {"judges": {"a": {**EXACT, "wieght": 1}}}, "params.judges.a has no key wieght; its keys are"),
        ("WeightedJudge", {"judges": {"a": EXACT}, "success": "b"}, "success is 'b'; expected all, any, or one of a"),
        (
            "WeightedJudge",
            {"judges": {"a": {**SHORT, "params": {"x": 1}}}},
            "params.judges.a.params: .*no parameter 'x'",
        ),
        ("WeightedJudge", {"judges": {"a": {**SHORT, "params": 3}}}, "params.judges.a.params is 3; expected a mapping"),
        ("GatedJudge", {"gate": EXACT}, "needs judge"),
        ("GatedJudge", {"gate": EXACT, "judge": 3}, "params.judge is 3; expected a mapping"),
    ],
)
def test_errors_of_a_configuration_name_the_entry(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(PluginError, match=text):
        make_judge(f"{MODULE}.composed_judges->{name}", CONFIG, params)
