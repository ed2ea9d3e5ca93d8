"""Agents that are answered by the starting model while the policy is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.cli.main import astuner
from astuner.config.consistency import inconsistencies
from astuner.config.root import RunConfig
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.model_tuner.tuner import ModelTuner
from astuner.run_record import read_episode, read_index
from astuner.schema import LlmCall, WorkflowTask

ROOT = Path(__file__).parents[3]
SETTINGS = (
    "rollout.agentscope_workflow=tests.backbone.local.test_starting_model->two_players",
    "rollout.trainable_targets=[learner]",
    "rollout.frozen_models={opponent: {model: starting_model}}",
    "rollout.num_repeat=4",
    "rollout.max_env_worker=2",
    "rollout.max_response_length_in_one_turn=8",
    "data.train_batch_size=2",
    "data.max_prompt_length=200",
    "data.max_response_length=300",
    "rollout.max_model_len=500",
    "trainer_common.optim.lr=0.05",
    "trainer_common.total_training_steps=2",
    "task_reader.dataset_file.validation.file_path=''",
)


async def two_players(task: WorkflowTask, tuner: ModelTuner) -> float:
    """Ask both players the question; the reward is arbitrary, so that the weights change."""
    for player in ("learner", "opponent"):
        await tuner.chat([{"role": "user", "content": task.main_query}], agent_name=player, target_tag=player)
    return float(task.seed % 5)


def logprobs(model: Any, call: LlmCall) -> torch.Tensor:
    ids = torch.tensor([[*call.prompt_ids, *call.completion_ids]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
    return torch.Tensor(scores[range(len(call.completion_ids)), list(call.completion_ids)])


def test_the_opponent_keeps_the_weights_of_the_start(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    yaml = "tutorial/example_solver_critic/solver_critic_tiny.yaml"
    settings = [f"astuner.{value}" for value in (f"model.path={model_folder}", *SETTINGS)]
    settings += ["astuner.rollout.max_env_worker=2"]
    astuner.main(["--conf", yaml, "--backbone=local", "--exp-dir", str(tmp_path), *settings], standalone_mode=False)
    (record,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    calls = [call for episode in episodes for call in episode.calls]
    assert len(calls) == 2 * 2 * 4 * 2
    distance = {
        (call.agent_name, call.policy_version): float((logprobs(start, call) - torch.tensor(call.logprobs)).abs().max())
        for call in calls
    }
    assert all(value < 1e-3 for (agent, _), value in distance.items() if agent == "opponent")
    assert distance["learner", 0] < 1e-3
    assert distance["learner", 1] > 1e-2
    assert {call.trained for call in calls if call.agent_name == "opponent"} == {False}
    assert {version for agent, version in distance if agent == "opponent"} == {0}


def test_targets_name_the_weights() -> None:
    frozen = {"old": FrozenModel("starting_model"), "same": FrozenModel(), "other": FrozenModel("m", "http://h/v1")}
    targets = Targets(("learner",), frozen)
    weights = [targets.weights(tag) for tag in ("learner", "same", "other", "old")]
    assert weights == ["policy", "policy", "policy", "starting_model"]


@pytest.mark.parametrize(
    ("backbone", "model", "message"),
    [
        ("verl", {"model": "starting_model"}, "is the starting model, which verl does not keep"),
        ("trinity", {"model": "starting_model"}, "is the starting model, which trinity does not keep"),
        ("local", {"model": "starting_model", "base_url": "http://127.0.0.1:1/v1"}, "only `model: starting_model`"),
        ("local", {"model": "starting_mode"}, "only `model: starting_model`"),
        ("local", {"model": "starting_model"}, None),
        ("debug", {"model": "starting_model"}, None),
    ],
)
def test_where_the_starting_model_can_answer(backbone: str, model: dict[str, str], message: str | None) -> None:
    rollout = {"trainable_targets": ["learner"], "frozen_models": {"opponent": model}}
    config = RunConfig.model_validate({"astuner": {"backbone": backbone, "rollout": rollout}})
    texts = [problem.text for problem in inconsistencies(config) if "frozen_models.opponent" in problem.text]
    assert len(texts) == (message is not None)
    assert message is None or message in texts[0]
