"""Whole runs of the local backbone on a random model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner import AstunerJob
from astuner.backbone.local.policy import Policy
from astuner.config.model import LoraConfig, ModelConfig
from astuner.errors import BackboneError, NoSignalError
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.run_record import read_episode, read_index, read_metrics
from tests.preloaded import AstunerProcess

MakeJob = Callable[..., AstunerJob]


def losses(folder: Path) -> dict[int, float]:
    """Return the policy loss by step."""
    return {row.step: row.metrics["loss/policy"] for row in read_metrics(folder) if "loss/policy" in row.metrics}


@pytest.mark.plots
def test_a_run_learns_and_leaves_its_record(make_job: MakeJob, tmp_path: Path, model_folder: Path):
    job = make_job(
        data__train_batch_size=3,
        rollout__num_repeat=6,
        rollout__max_env_worker=6,  # the engine samples for them at once
        trainer_common__total_training_steps=16,
        trainer_common__test_freq=10,
        trainer_common__val_before_train=True,
        trainer_common__optim__lr=2e-2,
    )
    tuned = job.tune(tmp_path / "records")
    summary = json.loads((tuned.record / "summary.json").read_text())
    assert set(summary) == {
        "backbone",
        "seed",
        "steps",
        "seconds",
        "validation",
        "first_reward_seconds",
        "tokens",
        "episodes",
        "model",
    }
    assert summary["validation"]["before"]["episodes"] == summary["validation"]["after"]["episodes"] == 4
    assert summary["episodes"] == {"ok": 288, "failed": 0, "dropped": 0}
    assert summary["tokens"]["raw"] > summary["tokens"]["distinct"] > summary["tokens"]["trained"] > 0
    rewards = [row.metrics["reward/mean"] for row in read_metrics(tuned.record) if "reward/mean" in row.metrics]
    assert len(rewards) == 16
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    index = list(read_index(tuned.record))
    assert len(index) == 288 + 3 * 4
    episode = read_episode(tuned.record / index[20].path)
    assert episode.samples[0].train_counts.count(1) == sum(len(call.completion_ids) for call in episode.calls)
    assert {path.name for path in (tuned.record / "plots").iterdir()} == {"reward.png", "loss.png"}
    model, tokenizer = tuned.load()
    before, _ = _weights(model_folder)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert tokenizer.chat_template
    assert ChatCodec(load_tokenizer(str(tuned.path))).renderer_name == "qwen3"


def _weights(folder: Path) -> tuple[dict[str, Any], Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict(), None


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gdpo", "rloo", "reinforce++", "gspo", "cispo"])
def test_every_algorithm_moves_the_weights(make_job: MakeJob, tmp_path: Path, algorithm: str):
    settings: dict[str, Any] = {"trainer_common__mini_batch_num": 2, "trainer_common__total_training_steps": 1}
    if algorithm in ("dapo", "gspo"):
        settings |= {"trainer_common__use_kl_loss": True, "trainer_common__kl_loss_type": "k2"}
    if algorithm == "rloo":
        settings |= {"trainer_common__algorithm__use_kl_in_reward": True}
    tuned = make_job(algorithm=algorithm, **settings).tune(tmp_path / "records")
    (row,) = [row for row in read_metrics(tuned.record) if "loss/policy" in row.metrics]
    assert row.metrics["update/optimiser_steps"] == 2
    assert row.metrics["grad_norm"] > 0
    assert row.metrics["logprob_difference"] < 1e-5
    assert ("loss/kl" in row.metrics) == ("trainer_common__use_kl_loss" in settings)


@pytest.mark.parametrize("pack", ["none", "tree"])
def test_calls_are_trained_at_their_own_temperatures(make_job: MakeJob, tmp_path: Path, pack: str):
    settings = {
        "trainer_common__use_kl_loss": True,
        "trainer_common__mini_batch_num": 2,
        "update__pack": pack,
    }
    tuned = make_job("MixesTemperatures", trainer_common__total_training_steps=2, **settings).tune(tmp_path / "records")
    rows = [row.metrics for row in read_metrics(tuned.record) if "loss/policy" in row.metrics]
    assert len(rows) == 2
    for row in rows:
        assert row["logprob_difference"] < 1e-5
        assert row["kl/rollout"] < 1e-6
    (entry, *_) = [entry for entry in read_index(tuned.record) if entry.split == "train"]
    episode = read_episode(tuned.record / entry.path)
    assert [call.sampling.temperature for call in episode.calls] == [1.8, 0.4, 0.6, 0.6]


@pytest.mark.parametrize("pack", ["none", "tree"])
def test_a_correction_acts_on_the_tokens_that_top_p_leaves_out(make_job: MakeJob, tmp_path: Path, pack: str):
    settings = {
        "rollout__temperature": 0.7,
        "rollout__top_p": 0.6,
        "update__pack": pack,
        "trainer_common__total_training_steps": 1,
    }
    record = make_job(**settings).tune(tmp_path / "records").record
    entries = [entry for entry in read_index(record) if entry.split == "train" and entry.advantage]
    calls = [call for entry in entries for call in read_episode(record / entry.path).calls]
    gaps = [
        sampled - whole for call in calls for sampled, whole in zip(call.sampler_logprobs, call.logprobs, strict=True)
    ]
    assert 0.0 <= min(gaps) < max(gaps) < -math.log(0.6)
    (row,) = [row.metrics for row in read_metrics(record) if "loss/policy" in row.metrics]
    # The logprobs over the whole vocabulary are those of the trainer.
    assert row["logprob_difference"] < 1e-5
    assert row["correction/gap_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-3)
    assert row["correction/gap_max"] == pytest.approx(max(gaps), rel=1e-3)
    assert row["ratio/mean"] == 1.0


def test_a_run_replaces_the_sampling_of_its_agents_if_configured(make_job: MakeJob, tmp_path: Path):
    settings = {"rollout__client_sampling": "override", "trainer_common__total_training_steps": 1}
    tuned = make_job("MixesTemperatures", **settings).tune(tmp_path / "records")
    for entry in read_index(tuned.record):
        episode = read_episode(tuned.record / entry.path)
        assert {call.sampling.temperature for call in episode.calls} == {1.0}
        assert episode.log_metrics == {"replaced_temperature": 3.0}
    (train,) = [row.metrics for row in read_metrics(tuned.record) if "loss/policy" in row.metrics]
    assert train["workflow/replaced_temperature"] == 3.0


def test_lora_trains_adapters_and_saves_a_whole_model(make_job: MakeJob, tmp_path: Path, model_folder: Path):
    settings = {"trainer_common__use_kl_loss": True, "trainer_common__total_training_steps": 2}
    tuned = make_job(model__lora={"rank": 4, "alpha": 8}, **settings).tune(tmp_path / "records")
    model, _ = tuned.load()
    before, _ = _weights(model_folder)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed
    assert all("proj" in name for name in changed)


def test_ratios_compare_the_trainer_with_itself_where_precision_is_low(make_job: MakeJob, tmp_path: Path):
    settings = {"model__dtype": "bfloat16", "trainer_common__optim__lr": 1e-4, "algorithm": "gspo"}
    settings["trainer_common__total_training_steps"] = 1
    rows = read_metrics(make_job("Letters", **settings).tune(tmp_path / "a").record)
    first = next(row.metrics for row in rows if "ratio/mean" in row.metrics)
    assert first["logprob_difference"] > 1e-4  # the sampler rounds differently
    assert (first["ratio/mean"], first["ratio/max"], first["clip_fraction"]) == (1.0, 1.0, 0.0)
    assert "kl/update" not in first  # the loss of the only mini-batch is computed before the update
    rows = read_metrics(make_job("Letters", trainer_common__mini_batch_num=2, **settings).tune(tmp_path / "b").record)
    first = next(row.metrics for row in rows if "ratio/max" in row.metrics)
    assert first["ratio/max"] != 1.0
    assert first["kl/update"] > 0.0


def test_a_mini_batch_without_signal_is_left_out(make_job: MakeJob, tmp_path: Path):
    """One of two groups has no variance, so some mini-batches may have nothing to teach."""
    settings = {"trainer_common__mini_batch_num": 4, "trainer_common__total_training_steps": 6}
    tuned = make_job("HalfLearns", **settings).tune(tmp_path / "records")
    rows = [row.metrics for row in read_metrics(tuned.record) if "loss/policy" in row.metrics]
    assert len(rows) >= 4
    assert min(row["update/optimiser_steps"] for row in rows) < 4


def test_handing_over_adapters_leaves_the_weights_below_them_alone(model_folder: Path):
    config = ModelConfig(path=str(model_folder), dtype="bfloat16", lora=LoraConfig(rank=4))
    policy = Policy(config, str(model_folder), torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    merged = policy.full_weights()
    policy.full_weights()
    assert all(torch.equal(before[name], value) for name, value in policy.model.state_dict().items())
    ids = torch.arange(8)[None]
    plain = policy.frozen_copy()
    plain.load_state_dict(merged)
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, policy.model(ids).logits, atol=0.15)
        assert not torch.allclose(plain(ids).logits, policy.frozen_copy()(ids).logits, atol=0.15)


def test_micro_batches_and_gradient_checkpointing_change_nothing(make_job: MakeJob, tmp_path: Path):
    steps = {"trainer_common__total_training_steps": 2}
    uninterrupted = make_job(**steps).tune(tmp_path / "a")
    cut = make_job(trainer_common__max_tokens_per_micro_batch=100, model__gradient_checkpointing=True, **steps)
    cut = cut.tune(tmp_path / "b")
    assert losses(cut.record) == pytest.approx(losses(uninterrupted.record), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("workflow", ["SolvesAtAnyLength", "SolvesSomeAtAnyLength"])
def test_dapo_leaves_out_groups_that_only_a_length_punishment_tells_apart(
    make_job: MakeJob, tmp_path: Path, workflow: str
):
    job = make_job(
        workflow,
        algorithm="dapo",
        data__max_response_length=60,
        trainer_common__algorithm__overlong_buffer_length=60,
        trainer_common__no_signal_patience=1,
        trainer_common__stop_on_no_signal=workflow == "SolvesAtAnyLength",
    )
    if workflow == "SolvesAtAnyLength":
        with pytest.raises(NoSignalError):
            job.tune(tmp_path / "records")
        (row,) = [row.metrics for row in read_metrics(tmp_path / "records/run") if "reward/mean" in row.metrics]
        assert "grad_norm" not in row
        return
    record = job.tune(tmp_path / "records").record
    advantages = {entry.task_id: [] for entry in read_index(record) if entry.split == "train"}
    for entry in read_index(record):
        if entry.split == "train":
            advantages[entry.task_id].append(entry.advantage)
    assert sorted(any(values) for values in advantages.values()) == [False] * 2 + [True] * 4


async def test_a_job_of_a_notebook_runs_and_logs_its_notices(make_job: MakeJob, tmp_path: Path):
    """The thread of a notebook runs an event loop, as the one of this test does."""
    settings = {"trainer_common__total_training_steps": 1}
    job = make_job("Letters", trainer_common__kl_loss_coef=0.7, rollout__n_vllm_engine=3, **settings)
    job.dump_job_as_yaml(tmp_path / "mine.yaml")
    tuned = AstunerJob().load_job_from_yaml(tmp_path / "mine.yaml").tune(tmp_path / "records")
    log_text = (tuned.record / "run.log").read_text()
    assert "no effect while use_kl_loss is false: astuner.trainer_common.kl_loss_coef" in log_text
    assert "astuner.rollout.n_vllm_engine" in log_text


def test_a_tenth_of_crashing_episodes_is_counted_and_the_step_completes(make_job: MakeJob, tmp_path: Path):
    tuned = make_job("TenthCrashes").tune(tmp_path / "records")
    assert (tuned.metrics.episodes.ok, tuned.metrics.episodes.failed) == (22, 2)
    failed = [entry for entry in read_index(tuned.record) if entry.status == "failed" and entry.split == "train"]
    assert [entry.error_kind for entry in failed] == ["workflow", "workflow"]
    assert all(entry.reward is None for entry in failed)


def test_a_run_whose_episodes_all_fail_stops_with_the_reason(make_job: MakeJob, tmp_path: Path):
    with pytest.raises(BackboneError, match=r"all 8 episodes failed.*typo in the agent"):
        make_job("AlwaysCrashes").tune(tmp_path / "records")


def test_no_signal_is_said_and_stops_when_asked(make_job: MakeJob, tmp_path: Path, log: list[str]):
    settings = {"trainer_common__no_signal_patience": 2, "trainer_common__total_training_steps": 2}
    make_job("NeverLearns", **settings).tune(tmp_path / "a")
    with pytest.raises(NoSignalError, match="2 consecutive steps had no learning signal"):
        make_job("NeverLearns", trainer_common__stop_on_no_signal=True, **settings).tune(tmp_path / "b")


def _in_a_process(job: AstunerJob, tmp_path: Path, records: Path, **environment: str) -> tuple[int, str]:
    """Run the job in a process; return the exit code and what it printed."""
    words = ("--conf", str(job.dump_job_as_yaml(tmp_path / "run.yaml")), "--exp-dir", str(records))
    with (tmp_path / "out.txt").open("w") as out:
        process = AstunerProcess(*words, cwd=tmp_path, output=out, env=os.environ | environment)
    return process.wait(120), (tmp_path / "out.txt").read_text()


def test_a_killed_run_goes_on_to_the_same_losses(make_job: MakeJob, tmp_path: Path):
    job = make_job("KilledAtStep", trainer_common__total_training_steps=5, trainer_common__save_freq=2)
    job.tune(tmp_path / "whole")
    for kill_with, exit_code, checkpoint in (("9", -9, 2), ("2", 130, 3)):
        killed = tmp_path / f"killed with {kill_with}"
        code, printed = _in_a_process(job, tmp_path, killed, KILL_AT="4", KILL_WITH=kill_with)
        assert code == exit_code, printed
        assert not (killed / "run/summary.json").exists()
        code, printed = _in_a_process(job, tmp_path, killed)
        assert code == 0, printed
        assert f"step {checkpoint}" in printed
        expected, got = losses(tmp_path / "whole/run"), losses(killed / "run")
        assert list(got) == [1, 2, 3, 4, 5]
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
        ends = [json.loads((folder / "run/summary.json").read_text()) for folder in (tmp_path / "whole", killed)]
        for key in ("steps", "tokens", "episodes"):
            assert ends[0][key] == ends[1][key]


def test_a_finished_run_is_moved_aside_not_resumed(make_job: MakeJob, tmp_path: Path):
    job = make_job(trainer_common__total_training_steps=1)
    first = job.tune(tmp_path / "records")
    job.tune(tmp_path / "records")
    assert (tmp_path / "records" / "run.1" / "summary.json").exists()
    assert list(losses(first.record)) == [1]


@pytest.mark.parametrize(
    ("settings", "key", "count"),
    [
        ({"rollout__val_kwargs__do_sample": False}, "val_pass_n", 4),
        ({"rollout__val_kwargs__temperature": 0.0}, "val_pass_n", 4),
        ({"rollout__val_kwargs__do_sample": False, "rollout__val_kwargs__num_repeat": 6}, "val_kwargs.num_repeat", 6),
    ],
)
def test_greedy_validation_runs_each_task_once_and_says_so(
    make_job: MakeJob, tmp_path: Path, settings: dict[str, Any], key: str, count: int
):
    steps = {"trainer_common__total_training_steps": 1, "trainer_common__val_before_train": True}
    job = make_job(**steps, trainer_common__val_pass_n=4, **settings)
    record = job.tune(tmp_path / "records").record
    assert [row.split for row in read_index(record)].count("val") == 2 * 2
    log = (record / "run.log").read_text()
    assert log.count("validation is greedy, so one episode per task is run") == 1
    assert f"instead of {count} equal ones (" in log
    assert key in log
    assert f"for pass@{count}, set rollout.val_kwargs.do_sample: True" in log
