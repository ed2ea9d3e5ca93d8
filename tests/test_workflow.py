"""Workflows that are plain async functions: loading, results, errors, and runs on the backbones of this machine."""

from __future__ import annotations

import asyncio
import functools
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astuner import AstunerJob, Workflow, WorkflowOutput, WorkflowTask
from astuner.errors import ConfigError, PluginError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.run_record import read_episode, read_index
from astuner.schema import Episode, Task
from astuner.task_runner.runner import TaskRunner
from astuner.workflow import load_workflow, workflow_factory
from tests.scripted_engine import ScriptedEngine

TASK = WorkflowTask(Task("t", "What is 1 + 2?", metadata={"answer": "3"}), "train-000001-t-0")


async def run(task, model_tuner):  # type: ignore[no-untyped-def]
    """Reward the answer that the task has."""
    answer = await model_tuner.chat([{"role": "user", "content": task.main_query}])
    return float(task.metadata["answer"] in answer.parsed.content)


async def by_repeat(task, model_tuner):  # type: ignore[no-untyped-def]
    """Have different rewards in a group."""
    await model_tuner.chat([*task.init_messages, {"role": "user", "content": task.main_query}])
    return WorkflowOutput(reward=float(task.repeat_index), metadata={"said": task.task.main_query})


def not_async(task, model_tuner):  # type: ignore[no-untyped-def]
    return 1.0


async def three(task, model_tuner, toolkit):  # type: ignore[no-untyped-def]
    return 1.0


async def two_with_options(task, model_tuner, *, turns=3):  # type: ignore[no-untyped-def]
    return await run(task, model_tuner)


async def yields(task, model_tuner):  # type: ignore[no-untyped-def]
    yield 1.0


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


@logged
async def wrapped(task, model_tuner):  # type: ignore[no-untyped-def]
    return await run(task, model_tuner)


class Agent:
    async def __call__(self, task: Any, model_tuner: Any) -> float:
        return await run(task, model_tuner)


an_object = Agent()
renamed = wrapped
number = 7


def episode_of(workflow: Any, codec: ChatCodec) -> Episode:
    ids = codec.tokenizer.encode("3<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=512)
    runner = TaskRunner(workflow_factory("module->run", workflow), None, engine, codec)
    settings = CallSettings(max_model_len=512, madness_checklist=())
    return asyncio.run(runner.run(TASK, runner.tuner(TASK, settings)))


@pytest.mark.parametrize("function", [run, two_with_options, wrapped, an_object, functools.partial(run)])
def test_a_function_is_a_workflow(tokenizer: Any, function: Any):
    episode = episode_of(function, ChatCodec(tokenizer))
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True)
    assert len(episode.samples) == len(episode.calls) == 1


@pytest.mark.parametrize(
    ("result", "reward"),
    [(0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (WorkflowOutput(reward=2, metadata={"a": 1}), 2.0)],
)
def test_a_function_returns_a_number_or_an_output(tokenizer: Any, result: Any, reward: float):
    async def returns(task: Any, model_tuner: Any) -> Any:
        await run(task, model_tuner)
        return result

    assert episode_of(returns, ChatCodec(tokenizer)).reward == reward


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "returns must return a reward (a number) or a WorkflowOutput, got NoneType: None"),
        ("1.0", "returns must return a reward (a number) or a WorkflowOutput, got str: '1.0'"),
        ({"solver": 1.0}, "got dict: {'solver': 1.0}"),
        (float("nan"), "WorkflowOutput.reward must be a finite number, got nan"),
    ],
)
def test_another_result_is_a_failed_episode(tokenizer: Any, result: Any, says: str):
    async def returns(task: Any, model_tuner: Any) -> Any:
        return result

    episode = episode_of(returns, ChatCodec(tokenizer))
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert says in str(episode.error)


def test_a_forgotten_await_is_named(tokenizer: Any):
    async def forgets(task: Any, model_tuner: Any) -> Any:
        return run(task, model_tuner)

    episode = episode_of(forgets, ChatCodec(tokenizer))
    assert "got a coroutine that was not awaited (run); write `await` in front of the call" in str(episode.error)


def test_a_wrapper_that_runs_the_function_itself_is_named(tokenizer: Any):
    @functools.wraps(run)
    def run_now(task: Any, model_tuner: Any) -> float:
        return 1.0

    assert "run returned float, not an awaitable; write `async def run`" in str(
        episode_of(run_now, ChatCodec(tokenizer)).error
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("not_async", "is a function without `async`; write `async def not_async(task, model_tuner)`"),
        ("three", "has the parameters (task, model_tuner, toolkit); it is called with two"),
        ("yields", "contains `yield`; an async function that returns the reward is expected"),
        ("number", "is 7, of type int; expected a class that derives from astuner.workflow.Workflow, or a function"),
        ("Agent", "derives from builtins.object; expected one that derives from astuner.workflow.Workflow"),
    ],
)
def test_an_object_that_is_not_a_workflow_is_rejected(name: str, says: str):
    with pytest.raises(PluginError) as caught:
        load_workflow(f"{__file__}->{name}", search=[Path(__file__).parents[1]])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("workflow", "says"),
    [
        (not_async, "write `async def not_async(task, model_tuner)`"),
        (lambda task, model_tuner: 1.0, "is a function without `async`"),
        (an_object, "is not a name of module"),
        (functools.partial(run), "is not a name of module"),
        (7, "expected a class that derives from astuner.workflow.Workflow, or a function"),
        (None, "or a function `async def run(task, model_tuner)`"),
    ],
)
def test_a_job_rejects_objects_that_the_yaml_cannot_name(workflow: Any, says: str):
    with pytest.raises(ConfigError) as caught:
        AstunerJob().set_workflow(workflow)
    assert says in str(caught.value)


def test_a_job_rejects_a_function_that_is_defined_inside_another():
    async def inner(task: Any, model_tuner: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="inner is defined inside a function"):
        AstunerJob().set_workflow(inner)


class Outer:
    class Inner(Workflow):
        async def execute(self, workflow_task: Any, model_tuner: Any) -> WorkflowOutput:
            return WorkflowOutput(reward=1.0)

    @staticmethod
    async def method(task: Any, model_tuner: Any) -> float:
        return 1.0


@pytest.mark.parametrize("workflow", [Outer.Inner, Outer.method])
def test_a_job_rejects_members_of_a_class(workflow: Any):
    with pytest.raises(ConfigError, match=r"Outer\.(Inner|method) is not a name of module .*; move it to module level"):
        AstunerJob().set_workflow(workflow)


@pytest.mark.parametrize(("backbone", "parallel"), [("debug", 1), ("debug", 2), ("local", 2)])
def test_a_run_with_a_function(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: str, parallel: int
):
    from astuner.cli.main import astuner

    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(
        textwrap.dedent(
            """\
            async def run(task, model_tuner):
                await model_tuner.chat([{"role": "user", "content": task.main_query}])
                return float(task.repeat_index)
            """
        )
    )
    Path("tasks.jsonl").write_text("".join(json.dumps({"question": f"{n} + 1?"}) + "\n" for n in range(2)))
    job = AstunerJob(
        model=model_folder,
        backbone=backbone,
        model__renderer="qwen3",
        debug__debug_first_n_tasks=2,
        debug__debug_max_parallel=parallel,
        rollout__num_repeat=2,
        rollout__max_env_worker=2,
        rollout__max_response_length_in_one_turn=4,
        rollout__compute_madness_checklist=[],
        data__train_batch_size=2,
        trainer_common__total_training_steps=1,
    )
    job.set_workflow("agent->run").set_data("file", "tasks.jsonl").dump_job_as_yaml("run.yaml")
    astuner.main(["--conf", "run.yaml", "--exp-dir", "records"], standalone_mode=False)
    (record,) = [folder for folder in Path("records").iterdir() if folder.is_dir()]
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    assert sorted(str(episode.reward) for episode in episodes) == ["0.0", "0.0", "1.0", "1.0"]
    assert all(episode.status == "ok" and len(episode.samples) == 1 for episode in episodes)


def test_a_job_trains_a_function(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "2 + 2?"}\n')
    job = AstunerJob(model=model_folder, rollout__num_repeat=2, trainer_common__total_training_steps=1)
    job.configure({"data.train_batch_size": 2, "rollout.max_response_length_in_one_turn": 4, "model.renderer": "qwen3"})
    tuned = job.set_workflow(by_repeat).set_data("file", "tasks.jsonl").tune()
    assert tuned.metrics.steps == 1
    assert tuned.metrics.episodes.ok == 4
