"""`astuner check`: what it shows of a run's memory, and configurations that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.conftest import Command


@pytest.mark.parametrize(
    ("backbone", "setting", "key"),
    [
        ("local", "rollout.num_repeat=1000000000000000000000000000000", "lower rollout.num_repeat"),
        ("debug", "rollout.num_repeat=1000000000000000000000000000000", "lower rollout.num_repeat"),
        ("local", "trainer_common.val_pass_n=1000000000000000000000000000000", "trainer_common.val_pass_n"),
        ("local", f"rollout.num_repeat=1{'0' * 400}", "lower rollout.num_repeat"),
    ],
)
def test_a_run_that_does_not_fit_is_an_error(backbone: str, setting: str, key: str, astuner: Command):
    sampled = ("astuner.rollout.val_kwargs.do_sample=True", "astuner.rollout.val_kwargs.temperature=1.0")
    ended = astuner("check", "--conf", "run.yaml", f"--backbone={backbone}", f"astuner.{setting}", *sampled)
    ended.says("the run needs about more than 1 PiB of memory, and this machine has", "episodes: more than 1 PiB", key)
    assert "this configuration can run" not in ended.out


def test_a_micro_batch_that_does_not_fit_names_its_keys(astuner: Command, folder: Path):
    config = (folder / "model/config.json").read_text()
    (folder / "model/config.json").write_text(config.replace('"vocab_size": ', '"vocab_size": 10000000'))
    ended = astuner("check", "--conf", "run.yaml", "astuner.rollout.max_response_length_in_one_turn=100")
    ended.says("weights: ", "use a smaller model.path", "logits of a micro-batch: ", "max_tokens_per_micro_batch")


def test_what_fits_is_shown_part_by_part(astuner: Command):
    ended = astuner("check", "--conf", "run.yaml")
    assert ended.code == 0, ended.out
    assert "memory     about " in ended.out
    for part in ("Python, libraries and tasks", "weights", "optimiser (AdamW)", "engine: weights"):
        assert part in ended.out
    assert ended.out.splitlines()[-1] == "OK: this configuration can run"
