"""Values that are no plain copies, and how far sampling may run ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.backbone.trinity import rules
from astuner.backbone.trinity.preflight import machine_problems
from astuner.backbone.trinity.rules import TrinityRunFacts
from tests.backbone.trinity.plans import GPU, TINKER, run_config


def test_a_step_of_trinitys_trainer_is_an_optimizer_step() -> None:
    run = run_config(
        trainer_common__mini_batch_num=3,
        trainer_common__save_freq=5,
        trainer_common__optim__lr_warmup_steps=2,
        asynchrony__sync_interval=2,
    ).astuner
    assert rules.updates(run, GPU) == 21
    assert rules.updates_between_checkpoints(run, GPU) == 15
    assert rules.updates_between_syncs(run, GPU) == 6
    assert rules.warmup_updates(run, GPU) == 6
    assert rules.sampling_args(run, GPU) == {"updates": 3}


@settings(deadline=None)  # The first example imports modules.
@given(interval=st.integers(1, 6), more=st.integers(0, 6), steps=st.integers(1, 40), data=st.data())
def test_no_sample_is_staler_than_the_cap(interval: int, more: int, steps: int, data: st.DataObject) -> None:
    """Whatever the trainer's pace: a step is begun only when few enough are untrained; weights come every so often."""
    cap = interval - 1 + more
    run = run_config(asynchrony__sync_interval=interval, asynchrony__max_staleness=cap).astuner
    ahead = rules.steps_ahead(run)
    assert ahead >= 0
    trained = version = 0
    for step in range(1, steps + 1):
        trained = data.draw(st.integers(max(trained, step - 1 - ahead), step - 1))
        if (step - 1) % interval == 0:
            version = trained
        assert step - 1 - version <= cap


@pytest.mark.parametrize(
    ("dtype", "plan", "sampler"),
    [("auto", TINKER, "float32"), ("auto", GPU, "bfloat16"), ("bfloat16", TINKER, "bfloat16")],
)
def test_the_samplers_type(dtype: str, plan: TrinityRunFacts, sampler: str) -> None:
    assert rules.sampler_dtype(run_config(model__dtype=dtype).astuner, plan) == sampler


def test_a_tinker_service_is_one_engine() -> None:
    run = run_config(rollout__n_vllm_engine=3).astuner
    assert (rules.engines(run, TINKER), rules.engines(run, GPU)) == (1, 3)
    assert (rules.engine_type(run, TINKER), rules.trainer_type(run, TINKER)) == ("tinker", "tinker")
    assert (rules.engine_type(run, GPU), rules.trainer_type(run, GPU)) == ("vllm", "verl")


def test_all_gpus_of_the_machine_unless_a_number_is_given_or_a_ray_is_joined() -> None:
    four = replace(GPU, gpus=4)
    assert rules.gpus_per_node(run_config().astuner, four) == 4
    assert rules.gpus_per_node(run_config(trainer_common__n_gpus_per_node=2).astuner, four) == 2
    assert rules.gpus_per_node(run_config(trainer_common__ray_address="auto").astuner, four) == 8


def test_the_share_of_a_gpu() -> None:
    assert rules.gpu_share(run_config().astuner, GPU) == 0.85
    assert rules.gpu_share(run_config(rollout__gpu_memory_utilization=0.5).astuner, GPU) == 0.5


@pytest.mark.parametrize(
    ("budget", "longest", "ulysses", "tokens"), [(16384, 4000, 1, 16384), (1000, 4001, 1, 4001), (1000, 4001, 2, 2001)]
)
def test_a_micro_batch_has_room_for_the_longest_sample(budget: int, longest: int, ulysses: int, tokens: int) -> None:
    run = run_config(
        trainer_common__max_tokens_per_micro_batch=budget, trainer_common__ulysses_sequence_parallel_size=ulysses
    ).astuner
    assert rules.tokens_per_gpu(run, replace(GPU, max_model_len=longest)) == tokens


def test_an_answer_leaves_room_for_a_prompt() -> None:
    assert rules.answer_tokens(run_config().astuner, replace(GPU, max_model_len=100)) == 99
    assert rules.answer_tokens(run_config().astuner, GPU) == 4096


def test_greedy_sampling_leaves_the_logits_as_they_are() -> None:
    assert rules.logits_divisor(run_config(rollout__temperature=0.0).astuner, GPU) == 1.0
    assert rules.logits_divisor(run_config(rollout__temperature=0.7).astuner, GPU) == 0.7


def test_the_kl_counts_only_where_it_is_asked_for() -> None:
    coefficient = rules.loss_args(run_config(trainer_common__kl_loss_coef=0.5).astuner, GPU)["kl_coef"]
    off = rules.loss_args(run_config(trainer_common__use_kl_loss=False).astuner, GPU)["kl_coef"]
    assert (coefficient, off) == (0.5, 0.0)


def test_a_task_has_a_process_to_itself_where_the_slowest_are_given_up() -> None:
    assert rules.runners_per_engine(run_config().astuner, 2) == 1
    over = {"asynchrony__over_rollout": 0.25, "data__train_batch_size": 6}
    assert rules.runners_per_engine(run_config(**over).astuner, 1) == 6
    assert rules.runners_per_engine(run_config(**over, rollout__max_env_worker=12).astuner, 1) == 3
    assert rules.runners_per_engine(run_config(**over, rollout__max_env_worker=2).astuner, 1) == 1
    assert rules.runners_per_engine(run_config(**over).astuner, 4) == 2
    assert rules.runners_per_engine(run_config(**over, rollout__max_env_worker=16).astuner, 4) == 1


def test_fully_async_is_not_asked_to_validate() -> None:
    assert len(rules.requested_tasks(run_config().astuner, GPU)) == 1
    assert rules.requested_tasks(run_config(asynchrony__sync_style="fully_async").astuner, GPU) == []


def test_expected_steps_are_part_of_the_batch_size() -> None:
    settings = {"data__train_batch_size": 3, "rollout__num_repeat": 4}
    assert rules.expected_samples(run_config(**settings).astuner, GPU) == 12
    assert rules.expected_samples(run_config(**settings, rollout__multi_turn__expected_steps=5).astuner, GPU) == 60


def test_clip_ranges_below_the_rounding_of_bfloat16_need_ratios_to_the_trainer() -> None:
    def problems(plan: TrinityRunFacts, algorithm: str = "gspo", **values: object) -> list[str]:
        config = run_config(trainer_common__algorithm__adv_estimator=algorithm, **values)
        return [problem.text for problem in machine_problems(config, plan) if "clip range" in problem.text]

    several: dict[str, object] = {"trainer_common__mini_batch_num": 2}
    (text,) = problems(GPU, **several)
    assert "mini_batch_num is 2, so the ratios of gspo are to the sampler's" in text
    (text,) = problems(GPU, "gspo_token", trainer_common__correction__old_logprobs="sampler")
    assert "old_logprobs is sampler" in text
    assert "; remove old_logprobs, or set clip_ratio_low" in text
    assert problems(TINKER, **several, model__dtype="bfloat16")
    assert problems(TINKER, **several) == problems(GPU) == problems(GPU, "grpo", **several) == []
    wide: dict[str, object] = {f"trainer_common__algorithm__clip_ratio_{side}": 0.05 for side in ("low", "high")}
    assert problems(GPU, **several, **wide) == problems(replace(GPU, mode="bench"), **several) == []
