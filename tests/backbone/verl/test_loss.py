"""The loss of verl's workers has the gradient of each algorithm's published formula, and that of verl's own losses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from astuner.algorithms.aggregate import sample_scales
from astuner.algorithms.correction import Correction
from astuner.algorithms.registry import resolve
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.corrections import CorrectionConfig
from tests.algorithms.published import PUBLISHED, Answer, published_objective

pytestmark = pytest.mark.verl

PROMPT = 2
MAX_LENGTH = 9


def answers_of(seed: int) -> list[Answer]:
    """Return two groups of four answers, with ratios within and outside of the clip ranges."""
    rng = random.Random(seed)
    answers = []
    for number in range(8):
        old = [rng.uniform(-3, -0.5) for _ in range(rng.randrange(2, MAX_LENGTH))]
        answers.append(
            Answer(number // 4, float(number % 4 != 1), [(value + rng.uniform(-0.5, 0.5), value) for value in old])
        )
    return answers


def row_loss_gradient(config: AlgorithmConfig, answers: list[Answer]) -> list[Tensor]:
    """Return the gradient of the loss that a verl worker computes, by answer, and last that of the entropies."""
    from tensordict import TensorDict

    from astuner.backbone.verl.loss import RowLoss

    def nested(rows: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    algorithm = resolve(config)
    assert algorithm.rule is not None
    rewards = torch.tensor([answer.reward for answer in answers])
    lengths = [len(answer.tokens) for answer in answers]
    groups = torch.tensor([answer.group for answer in answers])
    advantages = algorithm.rule.advantages(rewards, groups, torch.tensor(lengths))
    scales = sample_scales(torch.tensor(lengths), torch.arange(len(answers)), algorithm.loss_agg_mode, MAX_LENGTH)
    old = [torch.tensor([value for _, value in answer.tokens]) for answer in answers]
    data = TensorDict(
        {
            "prompts": nested([torch.zeros(PROMPT, dtype=torch.int64)] * len(answers)),
            "responses": nested([torch.zeros(length, dtype=torch.int64) for length in lengths]),
            "loss_mask": nested([torch.ones(length, dtype=torch.int64) for length in lengths]),
            "rollout_log_probs": nested(old),
            "old_log_probs": nested(old),
            "sampler_log_probs": nested(old),
            "advantages": nested([torch.full((n,), float(a)) for n, a in zip(lengths, advantages, strict=True)]),
            "call_starts": nested([torch.zeros(1, dtype=torch.int64)] * len(answers)),
            "call_ends": nested([torch.tensor([length]) for length in lengths]),
            "row_scale": scales,
            "mini_batch": torch.zeros(len(answers), dtype=torch.int64),
            "row": torch.arange(len(answers)),
            "dp_size": torch.tensor(1),
        }
    )
    # The model's output has an entry for each token; the one before a token has its logprob.
    logprobs = [torch.tensor([new for new, _ in answer.tokens], requires_grad=True) for answer in answers]
    flat = torch.cat([torch.cat([torch.zeros(PROMPT - 1), row, torch.zeros(1)]) for row in logprobs])
    loss = RowLoss(config, 0.0, "k1", Correction(CorrectionConfig(mode="none"), False), own_ratio=False)
    entropy = torch.ones(len(flat), requires_grad=True)
    value, _ = loss({"log_probs": flat, "entropy": entropy}, data)
    return list(torch.autograd.grad(value, [*logprobs, entropy], materialize_grads=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_gradient_is_that_of_the_published_formula(name: str) -> None:
    answers = answers_of(len(name))
    gradient = row_loss_gradient(AlgorithmConfig(adv_estimator=name), answers)
    logprobs = [
        [torch.tensor(new, dtype=torch.float32).double().requires_grad_() for new, _ in answer.tokens]
        for answer in answers
    ]
    objective = published_objective(name, answers, logprobs, MAX_LENGTH)
    places = [value for row in logprobs for value in row]
    expected = torch.stack(
        [
            torch.zeros((), dtype=torch.float64) if value is None else -value
            for value in torch.autograd.grad(objective, places, allow_unused=True)
        ]
    )
    difference = torch.cat(gradient[:-1]).double() - expected
    assert expected.norm() > 1e-2
    assert difference.norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("name", "mode", "settings"),
    [
        ("grpo", "vanilla", {"clip_ratio_dual": 1.3}),
        ("gspo", "gspo", {}),
        ("gspo_token", "gspo", {}),
        ("gmpo", "geo_mean", {}),
        ("sapo", "sapo", {}),
    ],
)
def test_gradient_is_that_of_verls_own_loss(name: str, mode: str, settings: dict[str, float]) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    answers = answers_of(1)
    config = AlgorithmConfig(adv_estimator=name, **settings)
    rule = resolve(config).rule
    assert rule is not None
    clip = {"clip_ratio": 0.2, "clip_ratio_low": rule.clip.low, "clip_ratio_high": rule.clip.high}
    actor = FSDPActorConfig(
        **clip,
        clip_ratio_c=settings.get("clip_ratio_dual", 1e9),
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        strategy="fsdp2",
    )
    rewards = torch.tensor([answer.reward for answer in answers])
    advantages = rule.advantages(rewards, torch.tensor([answer.group for answer in answers]))
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    mask = (torch.arange(MAX_LENGTH) < lengths[:, None]).long()
    current, old = torch.zeros(2, len(answers), MAX_LENGTH)
    for row, answer in enumerate(answers):
        current[row, : lengths[row]], old[row, : lengths[row]] = torch.tensor(answer.tokens).T
    current.requires_grad_()
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=current,
        advantages=advantages[:, None].expand(mask.shape),
        response_mask=mask,
        loss_agg_mode="seq-mean-token-mean",
        config=actor,
    )
    (theirs,) = torch.autograd.grad(loss, current)
    ours = torch.cat(row_loss_gradient(config, answers)[:-1])
    assert (ours - theirs[mask.bool()]).norm() <= 1e-5 * ours.norm()
    if settings:
        without = torch.cat(row_loss_gradient(AlgorithmConfig(adv_estimator=name), answers)[:-1])
        assert (ours - without).norm() > 1e-2 * ours.norm()


def test_the_entropy_bonus_has_the_weights_of_the_tokens() -> None:
    answers = answers_of(1)
    assert not row_loss_gradient(AlgorithmConfig(), answers)[-1].any()
    gradient = row_loss_gradient(AlgorithmConfig(entropy_coef=0.5), answers)[-1]
    lengths = [len(answer.tokens) for answer in answers]
    expected = [torch.tensor([0.0] * (PROMPT - 1) + [-0.5 / n / len(answers)] * n + [0.0]) for n in lengths]
    torch.testing.assert_close(gradient, torch.cat(expected))
