"""TaskRunner: errors of workflows and judges become failed episodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.context_tracker.merge import MergeMode, build_samples
from astuner.debugging.deadlines import deadline
from astuner.env_service.episodes import EpisodeEnvironments
from astuner.errors import CallLimitError, EpisodeStopped
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Episode, LlmCall, Sample, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine

TASK = WorkflowTask(Task("t", "What is 1 + 2?", metadata={"answer": "3"}), "train-000001-t-0")


class LengthJudge(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return float(len(workflow_output.metadata["said"])), True


class Talk(Workflow):
    reward: Any = None
    madness = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=self.reward, metadata={"said": answer.parsed.content})


class Rewarded(Talk):
    reward = 0.0


class Raises(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await super().execute(workflow_task, model_tuner)
        raise KeyError("no such thing")


class Exits(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        raise SystemExit(3)


class Hangs(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await super().execute(workflow_task, model_tuner)
        await asyncio.sleep(60)
        raise AssertionError


class OwnTimeout(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        raise TimeoutError("the user's own")


class WrongOutput(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        return "well"  # type: ignore[return-value]


class ForgotAwait(Workflow):
    async def execute(self, workflow_task: Any, model_tuner: Any) -> Any:
        return self.reply()

    async def reply(self) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0)


class NotAsync(Workflow):
    def execute(self, workflow_task: Any, model_tuner: Any) -> Any:
        return WorkflowOutput(reward=1.0)


class NeedsArguments(Talk):
    def __init__(self, environment: str) -> None:
        self.environment = environment


class NotANumber(Talk):
    reward = math.nan


class SaysNothing(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0)


class SwallowsErrors(Talk):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        try:
            return await super().execute(workflow_task, model_tuner)
        except Exception:
            return WorkflowOutput(reward=1.0)


class Loops(Talk):
    """Calls the model until it is stopped."""

    async def turn(self, model_tuner: ModelTuner) -> None:
        await model_tuner.chat([{"role": "user", "content": "again"}])

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        while True:
            await self.turn(model_tuner)


class LoopsInTasks(Loops):
    async def turn(self, model_tuner: ModelTuner) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(super().turn(model_tuner))


class LoopsAndRaisesItsOwn(Loops):
    async def turn(self, model_tuner: ModelTuner) -> None:
        try:
            await super().turn(model_tuner)
        except Exception as error:
            raise RuntimeError("the agent gave up") from error


class LoopsOverErrors(Loops):
    async def turn(self, model_tuner: ModelTuner) -> None:
        with contextlib.suppress(Exception):
            await super().turn(model_tuner)


class LoopsOverEverything(Loops):
    async def turn(self, model_tuner: ModelTuner) -> None:
        with contextlib.suppress(KeyboardInterrupt, Exception, EpisodeStopped):
            await super().turn(model_tuner)


class ReturnsWhatItHas(Loops):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        try:
            return await super().execute(workflow_task, model_tuner)
        except CallLimitError:
            return WorkflowOutput(reward=0.25, metadata={"turns": len(model_tuner.calls)})


class FinalAnswerJudge(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return float(workflow_output.metadata == {"final_answer": "three"}), False


def run(tokenizer: Any, workflow: type[Workflow], answer: str = "three<|im_end|>", **changes: Any) -> Episode:
    ids = tokenizer.encode(answer, add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    judge = changes.pop("judge", LengthJudge(TaskJudgeConfig()))
    settings = CallSettings(max_tokens=2000, **changes.pop("settings", {}))
    runner = TaskRunner(workflow, judge, engine, ChatCodec(tokenizer, "qwen3"), **{"episode_timeout": 5.0, **changes})
    return asyncio.run(runner.run(TASK, runner.tuner(TASK, settings)))


def test_a_workflow_without_reward_is_judged(tokenizer: Any):
    episode = run(tokenizer, Talk)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 5.0, True)
    assert len(episode.samples) == len(episode.calls) == 1


def test_a_workflow_with_reward_needs_no_judge(tokenizer: Any):
    episode = run(tokenizer, Rewarded, judge=None)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 0.0, False)


@pytest.mark.parametrize(
    ("workflow", "kind", "says"),
    [
        (Raises, "workflow", "KeyError: 'no such thing' (at "),
        (Exits, "workflow", "SystemExit: 3"),
        (OwnTimeout, "workflow", "the user's own"),
        (ForgotAwait, "workflow", "a coroutine that was not awaited (ForgotAwait.reply); write `await`"),
        (NotAsync, "workflow", "execute returned WorkflowOutput, not an awaitable: write it as `async def execute"),
        (WrongOutput, "workflow", "must return a WorkflowOutput, got str: 'well'"),
        (NotANumber, "workflow", "WorkflowOutput.reward must be a finite number, got nan"),
    ],
)
def test_a_workflow_that_misbehaves_is_a_failed_episode(tokenizer: Any, workflow: type[Workflow], kind: str, says: str):
    episode = run(tokenizer, workflow)
    assert (episode.status, episode.reward, episode.error_kind, episode.samples) == ("failed", None, kind, ())
    assert says in (episode.error or "")
    assert "test_runner.py" in (episode.error or "") or kind != "workflow" or "WorkflowOutput" in (episode.error or "")


def test_a_workflow_that_cannot_be_made_is_a_failed_episode(tokenizer: Any):
    episode = run(tokenizer, NeedsArguments)
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert "missing 1 required positional argument: 'environment'" in (episode.error or "")


def test_a_hanging_workflow_is_timed_out_with_its_calls_kept(tokenizer: Any):
    episode = run(tokenizer, Hangs, episode_timeout=2.0)
    assert (episode.status, episode.error_kind, len(episode.calls)) == ("failed", "timeout", 1)
    assert "train-000001-t-0/0" in (episode.error or "")


class SlowEnvironments(EpisodeEnvironments):
    @contextlib.asynccontextmanager
    async def instance(self, workflow_task: WorkflowTask, seconds: float | None) -> AsyncIterator[None]:
        await asyncio.sleep(0.2)
        yield None


def test_the_creation_of_the_environment_counts_towards_the_time_limit(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    limits = []

    def recorded(seconds: float | None, message: Callable[[], str]) -> AbstractAsyncContextManager[asyncio.Timeout]:
        limits.append(seconds)
        return deadline(seconds, message)

    monkeypatch.setattr("astuner.task_runner.runner.deadline", recorded)
    assert run(tokenizer, Talk, environments=SlowEnvironments(), episode_timeout=300.0).status == "ok"
    (limit,) = limits
    assert limit is not None
    assert limit <= 299.8


def test_interrupt_before_the_workflow_starts_is_a_failed_episode(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:  # as a signal does, wherever the thread stands
        raise KeyboardInterrupt

    monkeypatch.setattr("astuner.task_runner.runner.deadline", interrupted)
    episode = run(tokenizer, Talk)
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert "KeyboardInterrupt" in (episode.error or "")


def test_a_missing_judge_is_a_failed_episode(tokenizer: Any):
    episode = run(tokenizer, Talk, judge=None)
    assert (episode.status, episode.error_kind) == ("failed", "judge")
    advice = "no judge is configured: return WorkflowOutput(reward=…) or set task_judge.judge_protocol"
    assert advice in (episode.error or "")


def test_an_episode_without_tokens_is_dropped(tokenizer: Any):
    episode = run(tokenizer, SaysNothing)
    assert (episode.status, episode.error_kind, episode.reward) == ("dropped", "no_tokens", 1.0)


@pytest.mark.parametrize("workflow", [Talk, SwallowsErrors])
@pytest.mark.parametrize("ends", [True, False])
def test_degenerate_output_has_its_own_reward(tokenizer: Any, workflow: type[Workflow], ends: bool):
    settings = {"madness_checklist": ("nonsense",), "madness_ends_episode": ends}
    episode = run(tokenizer, workflow, answer="la " * 300, settings=settings, madness_reward=-2.0)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", -2.0, False)
    assert episode.anomaly is not None
    assert (episode.anomaly.check, episode.anomaly.call, episode.anomaly.call_id) == (
        "repetition", 1, episode.calls[0].call_id
    )  # fmt: skip
    assert "repeats itself" in str(episode.anomaly)
    assert episode.samples


LOOPING = [Loops, LoopsInTasks, LoopsAndRaisesItsOwn, LoopsOverErrors, LoopsOverEverything]


@pytest.mark.parametrize("workflow", LOOPING)
def test_an_episode_past_max_steps_is_cut_and_judged(tokenizer: Any, workflow: type[Workflow]):
    judge = FinalAnswerJudge(TaskJudgeConfig())
    episode = run(tokenizer, workflow, judge=judge, settings={"max_calls": 3}, episode_timeout=1.0)
    assert (episode.status, episode.error_kind, episode.reward, episode.is_success) == ("ok", "max_steps", 1.0, False)
    assert "cut: the episode started LLM call 4, but rollout.multi_turn.max_steps is 3" in (episode.error or "")
    assert len(episode.calls) == 3
    assert sum(sum(sample.train_counts) for sample in episode.samples) == sum(
        len(call.completion_ids) for call in episode.calls
    )


@pytest.mark.parametrize("workflow", [*LOOPING, ReturnsWhatItHas])
def test_an_episode_past_max_steps_fails_if_that_is_configured(tokenizer: Any, workflow: type[Workflow]):
    settings = {"max_calls": 2}
    episode = run(tokenizer, workflow, settings=settings, on_max_steps="fail", episode_timeout=1.0)
    assert (episode.status, episode.error_kind, episode.reward, len(episode.calls)) == ("failed", "max_steps", None, 2)


def test_a_cut_episode_without_a_judge_says_what_to_do(tokenizer: Any):
    episode = run(tokenizer, Loops, judge=None, settings={"max_calls": 2})
    assert (episode.status, episode.error_kind) == ("failed", "max_steps")
    assert "set task_judge.judge_protocol, or catch astuner.errors.CallLimitError" in (episode.error or "")


def test_a_workflow_may_return_its_own_output_when_it_is_cut(tokenizer: Any):
    episode = run(tokenizer, ReturnsWhatItHas, judge=None, settings={"max_calls": 2})
    assert (episode.status, episode.error_kind, episode.reward) == ("ok", "max_steps", 0.25)
    assert episode.metadata == {"turns": 2}
    # A judge that needs more than the last answer fails as for any other output.
    episode = run(tokenizer, Loops, settings={"max_calls": 2})
    assert (episode.status, episode.error_kind) == ("failed", "judge")
    assert "KeyError: 'said'" in (episode.error or "")


def test_an_episode_within_the_limit_is_not_marked(tokenizer: Any):
    episode = run(tokenizer, Talk, settings={"max_calls": 1})
    assert (episode.status, episode.error_kind, episode.error) == ("ok", None, None)


class Evil:
    """An object of which no method can be used."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __len__ = __bool__ = __float__ = __reduce__ = __format__ = __eq__ = __str__  # type: ignore[assignment]

    def __hash__(self) -> int:
        return 1


class EvilText(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise SystemExit(3)

    __len__ = __format__ = __eq__ = __getitem__ = __str__  # type: ignore[assignment]
    __hash__ = str.__hash__


class EvilMapping(dict[str, object]):
    def items(self) -> Any:
        raise SystemExit(3)

    keys = values = __len__ = __iter__ = items  # type: ignore[assignment]


@pytest.mark.parametrize(
    "metadata",
    [{"a": Evil()}, {Evil(): 1}, {"a": EvilText("x")}, {EvilText("k"): 1}, {"a": [EvilMapping()]}, EvilMapping(a=1)],
    ids=["value", "key", "text", "text as key", "nested mapping", "mapping"],
)
def test_metadata_of_hostile_objects_is_recorded_as_text(tokenizer: Any, metadata: dict[Any, Any]):
    class Returns(Talk):
        async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            await super().execute(workflow_task, model_tuner)
            return WorkflowOutput(reward=1.0, metadata=metadata)

    episode = run(tokenizer, Returns)
    assert episode.status == "ok"
    assert json.loads(json.dumps(episode.metadata)) == episode.metadata
    assert pickle.loads(pickle.dumps(episode)) == episode


@pytest.mark.parametrize(
    "value",
    [10**400, Evil(), EvilText("1"), 10**5000, [1.0]],
    ids=["large", "object", "text", "too large to print", "list"],
)
def test_log_metric_or_reward_that_is_not_a_float_fails_the_episode(tokenizer: Any, value: Any):
    class Logs(Talk):
        async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            await super().execute(workflow_task, model_tuner)
            return WorkflowOutput(reward=1.0, log_metrics={"name": value})

    class Judges(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return value, True

    logs = run(tokenizer, Logs)
    assert (logs.status, logs.error_kind) == ("failed", "workflow")
    assert "log_metrics['name'] must be a finite number, got " in (logs.error or "")
    judged = run(tokenizer, Talk, judge=Judges(TaskJudgeConfig()))
    assert (judged.status, judged.error_kind) == ("failed", "judge")
    assert "expected (reward, is_success): a finite number and a bool" in (judged.error or "")


@pytest.mark.parametrize("merge", ["leaf", "tree", "none"])
@pytest.mark.parametrize("field", ["token_ids", "logprobs", "train_counts"])
def test_an_episode_fails_whose_samples_differ_from_its_calls(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, merge: Any, field: str
):
    def build_wrongly(calls: Sequence[LlmCall], mode: MergeMode = "leaf") -> list[Sample]:
        (sample,) = build_samples(calls, mode)
        values = getattr(sample, field)
        return [replace(sample, **{field: (*values[:-1], values[-1] + 1)})]

    assert run(tokenizer, Rewarded, merge=merge).status == "ok"
    monkeypatch.setattr("astuner.task_runner.groups.build_samples", build_wrongly)
    episode = run(tokenizer, Rewarded, merge=merge)
    assert (episode.status, episode.error_kind, episode.reward) == ("failed", "inexact", None)
    assert "0% of the calls" in str(episode.error)
    expected = {
        "token_ids": "1 calls have different tokens",
        "logprobs": "their prompts, logprobs or positions differ",
        "train_counts": "the loss mask trains 1 tokens that the model did not sample",
    }
    assert expected[field] in str(episode.error)
    assert len(episode.calls) == 1
    assert episode.samples == ()
