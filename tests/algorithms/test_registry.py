from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from astuner.algorithms.policy_batch import NO_CLIP, ClipRange
from astuner.algorithms.registry import resolve
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.algorithms import ALGORITHMS, AlgorithmName
from docs.algorithm_tables import PARTS
from docs.key_tables import with_generated_parts

PPO = ClipRange(0.2, 0.2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_declared_algorithm_is_configurable_and_cited(name: str) -> None:
    assert name in get_args(AlgorithmName)
    algorithm = resolve(AlgorithmConfig(adv_estimator=name))
    assert algorithm.name == name
    assert "arXiv:" in ALGORITHMS[name].citation
    if algorithm.rule is not None:
        advantages = algorithm.rule.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        assert advantages[0] > advantages[1]
        assert callable(algorithm.rule.loss_function)


def test_the_table_in_the_documentation_is_up_to_date() -> None:
    """If this fails, run `make generated`."""
    page = (Path(__file__).parents[2] / "docs/en/algorithms.md").read_text(encoding="utf-8")
    assert page == with_generated_parts(page, PARTS)


def test_an_algorithm_without_a_paper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "mine", replace(ALGORITHMS["grpo"], citation="My own idea."))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mine in astuner/config/algorithms\.py cites no paper; write arXiv:NUMBER"):
        PARTS["algorithms"]()


@pytest.mark.parametrize(
    ("name", "clip", "aggregation", "by_std", "dynamic_sampling"),
    [
        ("grpo", PPO, "seq-mean-token-mean", True, False),
        ("dr_grpo", PPO, "seq-mean-token-sum-norm", False, False),
        ("dapo", ClipRange(0.2, 0.28), "token-mean", True, True),
        ("gdpo", PPO, "seq-mean-token-mean", True, False),
        ("gigpo", PPO, "seq-mean-token-mean", True, False),
        ("rloo", NO_CLIP, "seq-mean-token-sum-norm", False, False),
        ("reinforce++", PPO, "token-mean", True, False),
        ("reinforce++_baseline", PPO, "token-mean", True, False),
        ("maxrl", PPO, "seq-mean-token-mean", False, False),
        ("opo", NO_CLIP, "seq-mean-token-sum-norm", False, False),
        ("gspo_token", ClipRange(3e-4, 4e-4), "seq-mean-token-mean", True, False),
        ("gmpo", ClipRange(0.4, 0.4), "seq-mean-token-mean", True, False),
        ("sapo", NO_CLIP, "seq-mean-token-mean", True, False),
        ("gspo", ClipRange(3e-4, 4e-4), "seq-mean-token-mean", True, False),
        ("cispo", ClipRange(1.0, 4.0), "token-mean", True, False),
    ],
)
def test_nulls_take_the_papers_values(name, clip, aggregation, by_std, dynamic_sampling):
    algorithm = resolve(AlgorithmConfig(adv_estimator=name))
    rule = algorithm.rule
    assert rule is not None
    assert (rule.clip, algorithm.loss_agg_mode, rule.norm_adv_by_std) == (clip, aggregation, by_std)
    assert rule.dynamic_sampling == dynamic_sampling


def test_explicit_values_override_the_algorithm():
    algorithm = resolve(
        AlgorithmConfig(
            adv_estimator="grpo",
            clip_ratio_high=0.3,
            clip_ratio_dual=3.0,
            loss_agg_mode="token-mean",
            norm_adv_by_std=False,
        )
    )
    assert algorithm.rule is not None
    assert algorithm.rule.clip == ClipRange(0.2, 0.3, 3.0)
    assert algorithm.loss_agg_mode == "token-mean"
    rewards, groups = torch.tensor([4.0, 0.0]), torch.tensor([0, 0])
    assert algorithm.rule.advantages(rewards, groups).tolist() == [2.0, -2.0]


def test_sft_has_no_rule():
    algorithm = resolve(AlgorithmConfig(adv_estimator="sft", prompt_loss_weight=0.1))
    assert algorithm.rule is None
    assert algorithm.loss_agg_mode == "token-mean"
