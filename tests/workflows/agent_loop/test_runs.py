"""Whole runs of the agent loop, with an environment service of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from astuner import AstunerJob
from astuner.cli.main import astuner
from astuner.context_tracker.audit import certificate
from astuner.run_record import read_episode, read_index
from tests.workflows.agent_loop import conftest


@pytest.mark.parametrize(
    ("backbone", "history"),
    [
        ("debug", "linear"),
        ("local", "sliding_window"),
        # Warnings of Ray, verl and Trinity vary between their versions.
        pytest.param("verl", "linear", marks=[pytest.mark.verl, pytest.mark.filterwarnings("ignore")]),
        pytest.param("trinity", "linear", marks=[pytest.mark.trinity, pytest.mark.filterwarnings("ignore")]),
    ],
)
def test_a_run_plays_environments(model_folder: Path, tmp_path: Path, backbone: str, history: str) -> None:
    # A backbone's environment may have another package `tests`.
    shutil.copy(conftest.__file__, tmp_path / "corridors.py")
    job = AstunerJob(
        algorithm="grpo",
        model=model_folder,
        experiment_name="run",
        backbone=backbone,
        model__renderer="qwen3",
        data__train_batch_size=1,
        rollout__use_agentscope_protocol=False,
        rollout__step_rewards="returns_to_go",
        rollout__gamma=0.5,
        rollout__num_repeat=2,
        rollout__max_env_worker=2,
        rollout__max_response_length_in_one_turn=6,
        rollout__max_model_len=512,
        rollout__compute_madness_checklist=[],
        rollout__multi_turn__max_steps=3,
        context_tracker={"context_tracker_type": history, "sliding_window_cm": {"turns": 1}},
        task_reader={
            "type": "env_service",
            "env_service": {
                "env_type": "corridors.py->PraisingCorridor",
                "env_url": "auto",
                "env_action_preference": "text",
                "validation_split": None,
            },
        },
        trainer_common__total_training_steps=1,
        trainer_common__val_before_train=False,
        trainer_common__device="cpu",
    )
    conf = tmp_path / "run.yaml"
    job.dump_job_as_yaml(conf)
    astuner.main(["--conf", str(conf), "--exp-dir", str(tmp_path / "records")], standalone_mode=False)
    record = tmp_path / "records" / ("run-debug" if backbone == "debug" else "run")
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    assert len(episodes) == 2
    for episode in episodes:
        assert (episode.status, episode.error_kind, episode.metadata["ended_by"]) == ("ok", "max_steps", "max_steps")
        assert certificate(episode.calls, episode.samples) == 1.0
        assert [call.reward for call in episode.calls] == [1.75, 1.5, 1.0]
        assert episode.log_metrics["env_return"] == 1.75
        moved = [call.fork.cause for call in episode.calls if call.fork]
        assert moved.count("window_moved") == (history == "sliding_window")
