"""Of the solver and the critic, only the solver's tokens are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astuner.cli.main import astuner
from astuner.context_tracker.audit import certificate
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.run_record import read_episode, read_index
from astuner.schema import Episode, Task, WorkflowTask
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_solver_critic.solver_critic import SolverAndCritic

ROOT = Path(__file__).parents[2]
SMALL = (
    "rollout.num_repeat=2",
    "rollout.max_env_worker=2",
    "rollout.max_response_length_in_one_turn=8",
    "data.train_batch_size=2",
    "data.max_prompt_length=200",
    "data.max_response_length=300",
    "rollout.max_model_len=500",
    "debug.debug_first_n_tasks=2",
    "trainer_common.total_training_steps=1",
    "task_reader.dataset_file.validation.file_path=''",
)


def assert_only_the_solver_is_trained(episode: Episode) -> None:
    assert episode.status == "ok", episode.error
    assert [(call.agent_name, call.target_tag, call.trained) for call in episode.calls] == [
        ("solver", "solver", True),
        ("critic", "critic", False),
        ("solver", "solver", True),
    ]
    calls = {call.call_id: call for call in episode.calls}
    n_trained = 0
    for sample in episode.samples:
        of_solver = {
            index
            for span in sample.spans
            if calls[span.call_id].agent_name == "solver"
            for index in range(span.end - len(calls[span.call_id].completion_ids), span.end)
        }
        assert {index for index, count in enumerate(sample.train_counts) if count} == of_solver
        n_trained += sum(sample.train_counts)
    assert n_trained == sum(len(call.completion_ids) for call in episode.calls if call.agent_name == "solver")
    assert certificate(episode.calls, episode.samples) == 1.0


@pytest.mark.parametrize("backbone", ["debug", "local"])
def test_a_run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: str):
    monkeypatch.chdir(ROOT)
    yaml = "tutorial/example_solver_critic/solver_critic_tiny.yaml"
    settings = [f"astuner.{setting}" for setting in (f"model.path={model_folder}", *SMALL)]
    astuner.main(
        ["--conf", yaml, f"--backbone={backbone}", "--exp-dir", str(tmp_path), *settings], standalone_mode=False
    )
    (record,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    assert len(episodes) == 4
    for episode in episodes:
        assert_only_the_solver_is_trained(episode)


async def test_the_critic_reads_the_draft_and_the_solver_the_remark(tokenizer: Any):
    answers = iter(("It is \\boxed{41}.", "You forgot to carry.", "Then \\boxed{42}."))
    engine = ScriptedEngine(
        lambda prompt, params: tokenizer.encode(f"{next(answers)}<|im_end|>", add_special_tokens=False), 8192
    )
    targets = Targets(("solver",), {"critic": FrozenModel()})
    runner = TaskRunner(SolverAndCritic, None, engine, ChatCodec(tokenizer), targets=targets)
    task = WorkflowTask(Task("1", "What is 19 + 23?", metadata={"answer": "42"}), "train-000001-1-0")
    settings = CallSettings(max_model_len=8192, max_response_length=8192)
    episode = await runner.run(task, runner.tuner(task, settings))
    assert_only_the_solver_is_trained(episode)
    assert (episode.reward, dict(episode.log_metrics)) == (1.0, {"draft_solved": 0.0})
    _, critic, final = episode.calls
    assert "It is \\boxed{41}." in critic.messages[-2]["content"]
    assert "You forgot to carry." in final.messages[-2]["content"]
    assert len(episode.samples) == 1
