"""Reference samples from each kind of source, and whole runs with learned rubrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.backbone.training.run_inputs import load_rubrics
from astuner.config.root import AstunerConfig
from astuner.errors import TaskDataError
from astuner.run_record import read_index, read_metrics
from astuner.task_judge.rubrics_auto_grader.grader import Rubrics
from tests.env_service.services import serving
from tests.task_judge.llm.scripted_endpoint import ScriptedEndpoint
from tests.task_judge.rubrics_auto_grader.test_learning import CLEAR, GradingModel

AGENTS = Path(__file__).parents[1] / "llm" / "judged_agents.py"
ROWS = [
    {"main_query": f"Why {i}?", "answer": f"{i} because", "final_answer": f"{i} is so", "score": 0} for i in range(8)
]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEndpoint]:
    for name in ("DASHSCOPE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    endpoint = ScriptedEndpoint(GradingModel())
    yield endpoint
    endpoint.close()


def load(folder: Path, endpoint: ScriptedEndpoint, **settings: Any) -> Rubrics:
    judge = {
        "judge_type": "rubrics_auto_grader",
        "llm": {"base_url": endpoint.base_url, "cache_dir": str(folder / "cache")},
        "rubrics_auto_grader": settings,
    }
    config = AstunerConfig.model_validate({"task_judge": judge})
    return load_rubrics(config, folder, [folder], None)


def test_samples_of_a_file(endpoint: ScriptedEndpoint, tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rubrics = load(tmp_path, endpoint, dataset_file={"training": {"file_path": "samples.jsonl"}})
    assert (rubrics.rubrics, rubrics.samples, rubrics.agreement) == ((CLEAR,), 6, 1.0)


def test_samples_of_a_hugging_face_folder(endpoint: ScriptedEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repo" / "data"
    folder.mkdir(parents=True)
    for split, rows in {"train": ROWS[:6], "held": ROWS[6:]}.items():
        (folder / f"{split}-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = "configs:\n- config_name: default\n  data_files:\n"
    card += "".join(f"  - {{split: {split}, path: data/{split}-*}}\n" for split in ("train", "held"))
    (tmp_path / "repo" / "README.md").write_text(f"---\n{card}---\n")
    source = {"dataset_path": str(tmp_path / "repo"), "validation_split": "held"}
    rubrics = load(tmp_path, endpoint, input_data_type="huggingface_dat_repo", huggingface_dat_repo=source)
    assert (rubrics.rubrics, rubrics.samples, rubrics.held_out) == ((CLEAR,), 6, 4)


def test_samples_of_an_environment(endpoint: ScriptedEndpoint, tmp_path: Path):
    with serving(tmp_path) as service:
        source = {"env_type": "guess", "env_url": service.address.url}
        options = {"reference_field": "high", "max_epochs": 1, "num_reference_samples": 12}
        rubrics = load(tmp_path, endpoint, input_data_type="env_service", env_service=source, **options)
    assert (rubrics.samples, rubrics.held_out) == (9, 3)


def test_a_missing_file_is_named(endpoint: ScriptedEndpoint, tmp_path: Path):
    with pytest.raises(TaskDataError, match=r"no file .*none\.jsonl"):
        load(tmp_path, endpoint, dataset_file={"training": {"file_path": "none.jsonl"}})


@pytest.mark.parametrize("mode", ["pointwise", "listwise"])
def test_a_run_is_graded_with_learned_rubrics(
    mode: str, endpoint: ScriptedEndpoint, model_folder: Path, tmp_path: Path
):
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    job = AstunerJob(
        algorithm="grpo",
        model=model_folder,
        experiment_name="run",
        model__renderer="qwen3",
        data__train_batch_size=2,
        rollout__num_repeat=3,
        rollout__max_env_worker=2,
        rollout__temperature=1.0,
        rollout__max_response_length_in_one_turn=6,
        rollout__max_model_len=256,
        rollout__compute_madness_checklist=[],
        trainer_common__total_training_steps=1,
        trainer_common__use_kl_loss=False,
        trainer_common__val_before_train=False,
        task_judge__judge_type="rubrics_auto_grader",
        task_judge__llm__base_url=endpoint.base_url,
        task_judge__llm__cache_dir=str(tmp_path / "cache"),
        task_judge__rubrics_auto_grader__grader_mode=mode,
        task_judge__rubrics_auto_grader__dataset_file__training__file_path=str(tmp_path / "samples.jsonl"),
    )
    job.set_workflow(f"{AGENTS}->Answers").set_data("file", tmp_path / "samples.jsonl")
    tuned = job.tune(tmp_path / "records")
    assert Rubrics.load(tuned.record / "rubrics.yaml").rubrics == (CLEAR,)
    (row,) = [row.metrics for row in read_metrics(tuned.record) if "reward/mean" in row.metrics]
    assert row["episodes/ok"] == 6
    rewards = {entry.reward for entry in read_index(tuned.record)}
    assert rewards
    assert rewards <= {0.0, 0.5, 1.0}
