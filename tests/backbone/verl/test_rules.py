"""Values that are no plain copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from astuner.algorithms.registry import resolve
from astuner.backbone.verl import rules
from astuner.backbone.verl.rules import VerlRunFacts
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.algorithms import ALGORITHMS
from tests.backbone.verl.plans import CPU, GPU, run_config


@pytest.mark.parametrize(
    ("dtype", "plan", "compute", "sampler"),
    [
        ("auto", CPU, "fp32", "float32"),
        ("auto", GPU, "bf16", "bfloat16"),
        ("float32", GPU, "fp32", "float32"),
        ("bfloat16", CPU, "bf16", "bfloat16"),
    ],
)
def test_precision(dtype: str, plan: VerlRunFacts, compute: str, sampler: str) -> None:
    run = run_config(model__dtype=dtype).astuner
    assert rules.mixed_precision(run, plan) == {"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    assert rules.rollout_dtype(run, plan) == sampler


@pytest.mark.parametrize(
    ("batch", "parts", "tasks"),
    [(32, 1, 32), (32, 4, 8), (7, 2, 3), (2, 4, 1)],
)
def test_tasks_of_a_mini_batch(batch: int, parts: int, tasks: int) -> None:
    run = run_config(data__train_batch_size=batch, trainer_common__mini_batch_num=parts).astuner
    assert rules.mini_batch_tasks(run, GPU) == tasks


@pytest.mark.parametrize(
    ("budget", "longest", "positions", "ulysses", "tokens"),
    [
        (16384, 4000, None, 1, 16384),
        (1000, 4000, None, 1, 4000),
        (1000, 4000, 2048, 1, 2048),
        (1000, 4001, None, 2, 2001),
        (3000, 4000, None, 2, 3000),
    ],
)
def test_a_micro_batch_has_room_for_the_longest_sample(
    budget: int, longest: int, positions: int | None, ulysses: int, tokens: int
) -> None:
    run = run_config(
        rollout__max_model_len=longest,
        trainer_common__max_tokens_per_micro_batch=budget,
        trainer_common__ulysses_sequence_parallel_size=ulysses,
    ).astuner
    assert rules.tokens_per_gpu(run, replace(GPU, max_positions=positions)) == tokens


def test_calls_are_not_longer_than_the_model_allows() -> None:
    run = run_config(rollout__max_model_len=4000).astuner
    assert rules.max_model_len(run, GPU) == 4000
    assert rules.max_model_len(run, replace(GPU, max_positions=512)) == 512
    assert rules.max_model_len(run, replace(GPU, max_positions=8192)) == 4000


def test_nothing_is_validated_without_tasks() -> None:
    run = run_config(trainer_common__val_before_train=True, trainer_common__test_freq=5).astuner
    none = replace(GPU, n_val=0)
    assert (rules.validate_first(run, GPU), rules.validation_steps(run, GPU)) == (True, 5)
    assert (rules.validate_first(run, none), rules.validation_steps(run, none)) == (False, -1)


def test_there_are_as_many_workers_as_asked_for_or_as_the_machine_has() -> None:
    default, two = run_config().astuner, run_config(trainer_common__n_gpus_per_node=2).astuner
    assert (rules.trainers_per_node(default, CPU), rules.trainers_per_node(two, CPU)) == (1, 2)
    assert (rules.trainers_per_node(default, GPU), rules.trainers_per_node(two, GPU)) == (8, 2)
    joined = run_config(trainer_common__ray_address="auto").astuner
    one_gpu = replace(GPU, gpus=1)
    assert (rules.trainers_per_node(default, one_gpu), rules.trainers_per_node(two, one_gpu)) == (1, 2)
    eight = run_config(trainer_common__n_gpus_per_node=8).astuner
    assert (rules.trainers_per_node(eight, one_gpu), rules.trainers_per_node(eight, CPU)) == (8, 8)
    assert (rules.trainers_per_node(joined, one_gpu), rules.trainers_per_node(joined, CPU)) == (8, 1)
    nodes = run_config(trainer_common__n_gpus_per_node=2, trainer_common__nnodes=3).astuner
    assert rules.pretended_gpus(nodes, CPU) == 6


@pytest.mark.parametrize("name", [name for name, spec in ALGORITHMS.items() if spec.reinforcement is not None])
def test_an_algorithm_has_its_papers_values_and_the_users_over_them(name: str) -> None:
    algorithm = resolve(AlgorithmConfig(adv_estimator=name))
    assert algorithm.rule is not None
    run = run_config(trainer_common__algorithm__adv_estimator=name).astuner
    assert rules.clip_low(run, GPU) == algorithm.rule.clip.low
    assert rules.clip_high(run, GPU) == algorithm.rule.clip.high
    assert rules.divides_by_std(run, GPU) is algorithm.rule.norm_adv_by_std
    assert rules.loss_aggregation(run, GPU) == algorithm.loss_agg_mode
    custom = run_config(
        trainer_common__algorithm__adv_estimator=name,
        trainer_common__algorithm__clip_ratio_low=0.1,
        trainer_common__algorithm__clip_ratio_high=0.4,
        trainer_common__algorithm__norm_adv_by_std=not algorithm.rule.norm_adv_by_std,
        trainer_common__algorithm__loss_agg_mode="token-mean",
    ).astuner
    assert (rules.clip_low(custom, GPU), rules.clip_high(custom, GPU)) == (0.1, 0.4)
    assert rules.divides_by_std(custom, GPU) is not algorithm.rule.norm_adv_by_std
    assert rules.loss_aggregation(custom, GPU) == "token-mean"


@pytest.mark.parametrize(
    ("name", "advantages", "loss"),
    [
        ("grpo", "grpo", "vanilla"),
        ("dapo", "grpo", "vanilla"),
        ("gspo", "grpo", "gspo"),
        ("cispo", "grpo", "cispo"),
        ("rloo", "rloo", "gpg"),
        ("reinforce++", "reinforce_plus_plus", "vanilla"),
        ("reinforce++_baseline", "reinforce_plus_plus_baseline", "vanilla"),
        ("maxrl", "grpo", "vanilla"),
        ("gmpo", "grpo", "geo_mean"),
        ("sapo", "grpo", "sapo"),
    ],
)
def test_an_algorithm_has_the_names_that_verl_has_for_it(name: str, advantages: str, loss: str) -> None:
    run = run_config(trainer_common__algorithm__adv_estimator=name).astuner
    assert (rules.advantage_estimator(run, GPU), rules.loss_mode(run, GPU)) == (advantages, loss)


def test_a_dual_clip_has_verls_name() -> None:
    assert rules.dual_clip(run_config().astuner, GPU) == 1e9
    assert rules.dual_clip(run_config(trainer_common__algorithm__clip_ratio_dual=3.0).astuner, GPU) == 3.0


def test_a_reference_model_is_there_for_a_kl_that_counts() -> None:
    assert rules.has_kl_loss(run_config().astuner, GPU)
    assert not rules.has_kl_loss(run_config(trainer_common__kl_loss_coef=0.0).astuner, GPU)
    assert not rules.has_kl_loss(run_config(trainer_common__use_kl_loss=False).astuner, GPU)


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({"rollout__temperature": 0.9}, "processed_logprobs"),
        ({"rollout__temperature": 1.0, "rollout__top_p": 0.9}, "raw_logprobs"),
        ({"rollout__temperature": 1.0, "rollout__top_k": 5}, "raw_logprobs"),
        ({"rollout__temperature": 0.0, "rollout__top_k": 5}, "processed_logprobs"),
        ({"rollout__val_kwargs__top_p": 0.9}, "processed_logprobs"),
    ],
)
def test_logprobs_are_of_all_tokens_as_the_trainers_are(values: dict[str, object], mode: str) -> None:
    assert rules.logprobs_mode(run_config(**values).astuner, GPU) == mode


def test_greedy_sampling_leaves_the_logits_as_they_are() -> None:
    assert rules.logits_divisor(run_config(rollout__temperature=0.0).astuner, GPU) == 1.0
    assert rules.logits_divisor(run_config(rollout__temperature=0.7).astuner, GPU) == 0.7


@pytest.mark.parametrize(("engine", "name"), [("embedded", "astuner_embedded"), ("vllm", "vllm")])
def test_the_sampler_has_verls_name(engine: str, name: str) -> None:
    assert rules.rollout_name(run_config().astuner, replace(GPU, rollout_engine=engine)) == name  # type: ignore[arg-type]
