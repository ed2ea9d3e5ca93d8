"""Whole runs with a teacher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner import AstunerJob
from astuner.errors import ModelError
from astuner.run_record import read_metrics


def metric(folder: Path, name: str) -> list[float]:
    return [row.metrics[name] or 0.0 for row in read_metrics(folder, lambda _: None) if name in row.metrics]


@pytest.fixture
def teacher_folder(model_folder: Path, tokenizer: Any, tmp_path: Path) -> Path:
    """The model with a sharper distribution of tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(4)
    model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_run_approaches_its_teacher(make_job: Callable[..., AstunerJob], teacher_folder: Path, tmp_path: Path):
    job = make_job(
        trainer_common__distillation__teacher=str(teacher_folder),
        data__train_batch_size=6,
        rollout__num_repeat=8,
        rollout__max_env_worker=8,  # the engine samples for them at once
        trainer_common__val_pass_n=1,
        trainer_common__total_training_steps=12,
        trainer_common__save_freq=12,
        trainer_common__algorithm__loss_agg_mode="token-mean",
        trainer_common__optim__lr=1e-2,
    )
    job.tune(tmp_path)
    folder = tmp_path / "run"
    kl = metric(folder, "distillation/kl")
    assert len(kl) == 12
    assert sum(kl[-4:]) < 0.95 * sum(kl[:4])
    assert all(value >= 0 for value in metric(folder, "time/teacher"))


def test_a_run_with_a_hint_for_itself(make_job: Callable[..., AstunerJob], tmp_path: Path):
    job = make_job(
        trainer_common__distillation__teacher="self",
        trainer_common__distillation__hint="Use letters: {unlucky}",
        trainer_common__distillation__reward_coef=1.0,
    )
    job.tune(tmp_path)
    folder = tmp_path / "run"
    assert len(metric(folder, "distillation/kl")) == 3
    assert set(metric(folder, "distillation/calls_without_hint")) == {0.0}
    assert min(metric(folder, "grad_norm")) > 0


def test_a_teacher_with_another_tokenizer_ends_the_run_before_it_starts(
    make_job: Callable[..., AstunerJob], teacher_folder: Path, tokenizer: Any, tmp_path: Path
):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(teacher_folder)
    other.add_tokens(["another" + "!" * 1000])
    other.save_pretrained(teacher_folder)
    with pytest.raises(
        ModelError,
        match=r"has another tokenizer than model\.path: 1 of \d+ tokens .*'another!.{,350}: \d+ instead of no id",
    ):
        make_job(trainer_common__distillation__teacher=str(teacher_folder)).tune(tmp_path)


def test_a_teacher_without_a_tokenizer_is_an_error(
    make_job: Callable[..., AstunerJob], teacher_folder: Path, tmp_path: Path
):
    for file in teacher_folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"^trainer_common\.distillation\.teacher '.*' has no tokenizer"):
        make_job(trainer_common__distillation__teacher=str(teacher_folder)).tune(tmp_path)


def test_a_teacher_that_does_not_exist_is_an_error(make_job: Callable[..., AstunerJob], tmp_path: Path):
    with pytest.raises(ModelError, match=r"trainer_common\.distillation\.teacher is './none', which does not exist"):
        make_job(trainer_common__distillation__teacher="./none").tune(tmp_path)
