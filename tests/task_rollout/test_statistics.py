"""Statistics of batches of episodes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from astuner.context_tracker.merge import build_samples
from astuner.schema import Episode, Fork, ForkCause, Judgement, LlmCall, Task
from astuner.task_rollout.statistics import RunTotals, batch_metrics, pass_at_k, validation_result


def episode(task: str, reward: float | None, success: bool | None = None, **changes: object) -> Episode:
    status = "failed" if reward is None else "ok"
    values: dict[str, object] = {"status": status, "reward": reward, "is_success": success, "repeat_index": 0}
    return Episode(episode_id=f"{task}-{reward}", task=Task(task, ""), **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 1), (4, 2, 2), (5, 3, 3), (5, 0, 2), (3, 3, 1), (6, 2, 4)])
def test_pass_at_k_is_the_fraction_of_k_subsets_with_a_success(n: int, correct: int, k: int):
    outcomes = [True] * correct + [False] * (n - correct)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_needs_k_attempts():
    with pytest.raises(ValueError, match=r"pass@3 needs at least 3 attempts, got 2"):
        pass_at_k(2, 1, 3)


def test_validation_counts_episodes_without_reward_as_lost():
    episodes = [episode("a", 1.0, True), episode("a", 0.0, False), episode("b", 0.0, False)]
    lost = episode("b", None, repeat_index=1)
    # The first attempt failed, the second did not: nothing is lost.
    again = [episode("b", None, repeat_index=2), episode("b", 1.0, True, repeat_index=2)]
    result = validation_result([*episodes, lost, *again], largest_k=2)
    assert (result.episodes, result.lost) == (4, 1)
    assert (result.success_rate, result.reward) == (0.5, 0.5)
    assert result.pass_at_k == {1: 0.5, 2: 1.0}
    nothing = validation_result([episode("a", None)], 1)
    assert math.isnan(nothing.reward)
    assert (nothing.episodes, nothing.pass_at_k) == (0, {})


def test_the_readers_of_a_mixture_have_success_rates_of_their_own():
    def result(source: str, name: str, success: bool | None) -> Episode:
        return replace(episode(name, None if success is None else 1.0, success), task=Task(name, "", source=source))

    episodes = [result("sums", "a", True), result("sums", "b", False), result("legs", "a", True)]
    episodes.append(result("legs", "b", None))
    assert validation_result(episodes, 1).success_by_source == {"legs": 1.0, "sums": 0.5}
    metrics = batch_metrics(episodes)
    assert (metrics["success/rate/legs"], metrics["success/rate/sums"]) == (1.0, 0.5)
    assert validation_result([episode("a", 1.0, True)], 1).success_by_source == {}


def test_batch_metrics_and_totals():
    call = LlmCall("c", "e", (1, 2), (3,), (-0.1,), "stop", fork=Fork("tools_changed", "b", 0, (1,), (2,), "a", "b", 0))
    longer = LlmCall("d", "e", (1, 2, 4, 5), (3, 6, 7), (-0.1,) * 3, "stop")
    episodes = [
        episode("a", 1.0, True, calls=(call,), log_metrics={"turns": 2}),
        episode("b", None),
        episode("c", 0.5, False, status="dropped", log_metrics={"turns": 4}),
    ]
    metrics = batch_metrics(episodes)
    assert metrics["reward/mean"] == 0.75
    assert metrics["success/rate"] == 0.5
    assert [metrics[f"episodes/{name}"] for name in ("ok", "failed", "dropped", "forks")] == [1, 1, 1, 1]
    assert metrics["workflow/turns"] == 3
    assert (metrics["tokens/raw"], metrics["tokens/saving"]) == (3, 1.0)
    assert [metrics[f"{name}/total"] for name in ("episodes", "calls", "samples")] == [3, 1, 0]
    forks = {name: count for name, count in metrics.items() if name.startswith("forks/")}
    assert set(forks) == {f"forks/{cause}" for cause in get_args(ForkCause)}
    assert (forks.pop("forks/tools_changed"), set(forks.values())) == (1, {0})
    lengths = batch_metrics([episode("a", 1.0, calls=(call, longer), samples=tuple(build_samples((call, longer))))])
    assert [lengths[f"length/{name}"] for name in ("prompt", "response", "response_max", "sample")] == [3, 2, 3, 5]
    totals = RunTotals()
    totals.add(episodes)
    totals.add(episodes)
    assert (totals.ok, totals.failed, totals.dropped, totals.tokens.raw) == (2, 2, 2, 6)


def test_metrics_of_judgements():
    scored = {"correct": 1.0, "format": 0.5}
    episodes = [
        episode("a", 1.0, True, judgement=Judgement(1.0, True, scored, metrics={"tokens": 10.0})),
        episode("b", 0.0, False, judgement=Judgement(0.0, False, {"correct": 0.0})),
        episode(
            "c", None, error_kind="unscored", judgement=Judgement(components={"correct": 1.0}, metrics={"tokens": 30.0})
        ),
        episode("d", None, error_kind="unscored/rate_limit"),
        episode("e", None, error_kind="judge"),
    ]
    metrics = batch_metrics(episodes)
    assert (metrics["reward/mean"], metrics["reward/correct/mean"], metrics["reward/format/mean"]) == (0.5, 0.5, 0.5)
    assert metrics["judge/tokens"] == 20.0
    assert (metrics["episodes/unscored"], metrics["unscored/rate_limit"], metrics["episodes/failed"]) == (2, 1, 3)
    assert batch_metrics([episode("a", 1.0)])["episodes/unscored"] == 0


def test_offered_called_and_failed_tools_are_counted():
    def call(number: int, *messages: dict[str, Any], **fields: Any) -> LlmCall:
        own = LlmCall(f"c{number}", "e", (1,), (2,), (-0.1,), "stop", messages=messages, tools_hash="t")
        return replace(own, **fields)

    def calling(*ids: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "tool_calls": [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in ids],
        }

    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    results = [
        {"role": "tool", "tool_call_id": "1", "content": "<returncode>1</returncode><stdout></stdout>"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "Error: no such file"}]},
        {"role": "tool", "tool_call_id": "3", "content": "<returncode>0</returncode><stdout>an Error</stdout>"},
    ]
    history = (question, calling("1", "2", "3"), *results)
    used = episode("a", 1.0, calls=(call(0, *history[:2]), call(1, *history, calling("4")), call(2, *history, answer)))
    unused = episode("b", 0.0, calls=(call(3, question, answer),))
    other = episode("c", 0.0, calls=(call(4, *history[:2], trained=False), call(5, question, answer, tools_hash="")))
    metrics = batch_metrics([used, unused, other])
    assert {name: value for name, value in metrics.items() if name.startswith("tools/")} == {
        "tools/offered": 2,
        "tools/used": 1,
        "tools/calls": 2.0,
        "tools/failed": 2,
    }
    assert not [name for name in batch_metrics([other]) if name.startswith("tools/")]
