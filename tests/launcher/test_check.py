"""`astuner check`: what it shows of a run's memory, and configurations that do not fit."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.conftest import Command, write_rows


def test_episodes_that_do_not_fit_are_an_error(astuner: Command, folder: Path):
    write_rows(folder / "val.jsonl", [{"question": f"question {i}", "answer": "1"} for i in range(2000)])
    words = ["rollout.val_kwargs.do_sample=True", "rollout.val_kwargs.temperature=1.0"]
    keys = (f"astuner.{word}" for word in (*words, "trainer_common.val_pass_n=100000"))
    ended = astuner("check", "--conf", "run.yaml", *keys)
    ended.says("GiB of memory, and this machine has", "\n  episodes: ", "lower rollout.num_repeat", "val_pass_n")
    assert "this configuration can run" not in ended.out


def test_more_repeats_than_a_run_can_have_are_an_error(astuner: Command):
    ended = astuner("check", "--conf", "run.yaml", f"astuner.rollout.num_repeat=1{'0' * 30}")
    ended.says("astuner.rollout.num_repeat is 1000000000000000000000000000000")


def test_a_micro_batch_that_does_not_fit_names_its_keys(astuner: Command, folder: Path):
    config = (folder / "model/config.json").read_text()
    (folder / "model/config.json").write_text(config.replace('"vocab_size": ', '"vocab_size": 10000000'))
    ended = astuner("check", "--conf", "run.yaml", "astuner.rollout.max_response_length_in_one_turn=100")
    ended.says("weights: ", "use a smaller model.path", "logits of a micro-batch: ", "max_tokens_per_micro_batch")


def test_an_estimate_that_fits_is_shown_part_by_part(astuner: Command):
    ended = astuner("check", "--conf", "run.yaml")
    assert ended.code == 0, ended.out
    assert "memory     about " in ended.out
    for part in ("Python, libraries and tasks", "weights", "optimizer (AdamW)", "engine: weights"):
        assert part in ended.out
    assert ended.out.splitlines()[-1] == "OK: this configuration can run"


def test_a_described_machine_needs_no_gpu_and_only_the_shape_of_the_model(astuner: Command, folder: Path):
    for file in (folder / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    for backbone, devices in (
        ("local", ["one GPU (trainer and engine)"]),
        ("verl", ["each of 4 GPUs (trainer and engine)"]),
        ("trinity", ["each of 2 GPUs of the trainer", "each of 2 GPUs of the engines"]),
    ):
        ended = astuner("check", "--conf", "run.yaml", "--machine", "4xL4-24G", f"--backbone={backbone}")
        assert ended.code == 0, ended.out
        for text in (*devices, "4 × L4, 24.00 GiB each", "log-probs", "gradients", "engine: key-value cache", "total"):
            assert text in ended.out
    auto = astuner("check", "--conf", "run.yaml", "--machine", "4xL4-24G", "astuner.backbone=auto")
    assert "trinity (auto: this machine has 4 GPUs)" in auto.out
    adapters = ("--backbone=trinity", "astuner.model.lora.rank=8")
    alone = astuner("check", "--conf", "run.yaml", "--machine", "1xL4-24G", *adapters)
    assert alone.code == 0, alone.out
    assert "memory of one GPU (a Tinker server, which trains adapters and samples)" in alone.out
    refused = astuner("check", "--conf", "run.yaml", "--machine", "1xL4-24G", "--backbone=trinity")
    refused.says("too few GPUs (1)", "use --backbone=verl, which shares one")


def test_a_described_machine_that_is_too_small_is_an_error(astuner: Command, folder: Path):
    config = (folder / "model/config.json").read_text()
    (folder / "model/config.json").write_text(config.replace('"vocab_size": ', '"vocab_size": 10000000'))
    ended = astuner("check", "--conf", "run.yaml", "--machine", "2xL4-24G", "--backbone=verl")
    assert ended.code == 1
    ended.says("update needs about ", "each of 2 GPUs", "24.00 GiB", "logits of a micro-batch: ", "max_tokens_per_")


def test_a_described_machine_is_not_combined_with_a_dry_run(astuner: Command):
    ended = astuner("check", "--conf", "run.yaml", "--machine", "2xL4-24G", "--dry-run")
    assert ended.code == 2
    assert "--machine starts nothing" in ended.out
    ended = astuner("check", "--conf", "run.yaml", "--machine", "2L4", "--backbone=local")
    ended.says("--machine is '2L4'", "8xH100-80G")
