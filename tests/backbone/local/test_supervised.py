"""The supervised stage on a random model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.errors import TaskDataError
from astuner.run_record import read_metrics
from tests.conftest import conversation


def make_job(model_folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> AstunerJob:
    for name, part in (("train", rows), ("val", rows[:4])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    values: dict[str, Any] = {
        "experiment_name": "sft",
        "model__renderer": "qwen3",
        "data__train_batch_size": 8,
        "trainer_common__total_epochs": 3,
        "trainer_common__optim__lr": 1e-2,
        "trainer_common__use_kl_loss": False,
    }
    job = AstunerJob(algorithm="sft", model=model_folder, **(values | settings))
    return job.set_data("file", tmp_path / "train.jsonl", validation_path=tmp_path / "val.jsonl")


@pytest.mark.plots
def test_the_loss_falls_and_only_the_assistant_is_trained(model_folder: Path, tmp_path: Path, tokenizer: Any):
    rng = random.Random(1)
    rows = [conversation(rng) for _ in range(40)]
    tuned = make_job(model_folder, tmp_path, rows).tune(tmp_path / "records")
    metrics = read_metrics(tuned.record)
    losses = [row.metrics["loss/sft"] for row in metrics if "loss/sft" in row.metrics]
    assert len(losses) == 15
    assert losses[-1] < 0.5 * losses[0]
    assert any("val/loss" in row.metrics for row in metrics)
    assert tuned.metrics.steps == 15
    trained = sum(row.metrics.get("tokens/trained", 0) for row in metrics)
    assert tuned.metrics.tokens.trained == trained > 0
    first = next(row.metrics for row in metrics if "tokens/trained" in row.metrics)
    assert 0 < first["tokens/trained"] < first["tokens/raw"]
    assert {path.name for path in (tuned.record / "plots").iterdir()} >= {"loss.png"}
    model, _ = tuned.load()
    assert model.config.model_type == "qwen3"


def test_prompt_tokens_weigh_as_configured(model_folder: Path, tmp_path: Path):
    rows = [conversation(random.Random(1)) for _ in range(8)]
    plain = make_job(model_folder, tmp_path, rows, trainer_common__total_epochs=1).tune(tmp_path / "a")
    weighted = make_job(
        model_folder,
        tmp_path,
        rows,
        trainer_common__total_epochs=1,
        trainer_common__algorithm__prompt_loss_weight=0.5,
    ).tune(tmp_path / "b")
    first = [read_metrics(run.record)[0].metrics["loss/sft"] for run in (plain, weighted)]
    assert first[0] != pytest.approx(first[1])


def test_a_transcript_that_does_not_fit_is_named(model_folder: Path, tmp_path: Path):
    rows = [conversation(random.Random(1)) for _ in range(8)]
    job = make_job(model_folder, tmp_path, rows, rollout__max_model_len=20, rollout__max_response_length_in_one_turn=5)
    with pytest.raises(TaskDataError, match=r"has \d+ tokens, more than 20"):
        job.tune(tmp_path / "records")


def test_a_transcript_of_no_use_is_found_before_the_first_step(model_folder: Path, tmp_path: Path):
    rows = [conversation(random.Random(1)) for _ in range(20)]
    rows[-1]["messages"][1]["content"] *= 100
    job = make_job(model_folder, tmp_path, rows, data__shuffle=False)
    with pytest.raises(TaskDataError, match=r"has \d+ tokens, more than 512"):
        job.tune(tmp_path / "records")
    assert not read_metrics(tmp_path / "records" / "sft")
