"""Each algorithm, from rewards to loss: a hand-worked example, its published formula, and freedom from splitting."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from astuner.algorithms.aggregate import sample_scales, token_weights
from astuner.algorithms.kl import token_kl
from astuner.algorithms.policy_batch import CallTable, PolicyBatch
from astuner.algorithms.registry import Algorithm, resolve
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.algorithms import ALGORITHMS, LossAggMode
from tests.algorithms.published import PUBLISHED, Answer, published_objective
from tests.examples import examples

REINFORCEMENT = [name for name in ALGORITHMS if name != "sft"]


@dataclass(frozen=True)
class TrainingRow:
    """A sample: `tokens` are places in the tables of logprobs, `calls` are (start, end) in `tokens`."""

    tokens: list[int]
    calls: list[tuple[int, int]]
    episode: int

    @property
    def mask(self) -> list[int]:
        return [sum(start <= t < end for start, end in self.calls) for t in range(len(self.tokens))]


def micro_batch(rows: list[TrainingRow], logprobs: Tensor, old: Tensor, advantages: Tensor) -> PolicyBatch:
    spans = [(place, start, end) for place, row in enumerate(rows) for start, end in row.calls]
    masks = pad_sequence([torch.tensor(row.mask) for row in rows], batch_first=True)
    return PolicyBatch(
        logprobs=pad_sequence([logprobs[row.tokens] for row in rows], batch_first=True, padding_value=-3.0),
        old_logprobs=pad_sequence([old[row.tokens] for row in rows], batch_first=True, padding_value=-9.0),
        advantages=advantages[[row.episode for row in rows]][:, None].expand(masks.shape),
        train_counts=masks,
        calls=CallTable(*torch.tensor(spans).unbind(1)),
    )


def mini_batch_loss(
    algorithm: Algorithm,
    micro_batches: list[list[TrainingRow]],
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    max_response_length: int = 10,
    kl_coef: float = 0.0,
) -> Tensor:
    """Return the loss of one optimizer step, the sum over its micro-batches."""
    assert algorithm.rule is not None
    rows = [row for rows in micro_batches for row in rows]
    scales = sample_scales(
        torch.tensor([sum(row.mask) for row in rows]),
        torch.tensor([row.episode for row in rows]),
        algorithm.loss_agg_mode,
        max_response_length,
    )
    parts = scales.split([len(rows) for rows in micro_batches])
    total = torch.zeros((), dtype=logprobs.dtype)
    for rows, part in zip(micro_batches, parts, strict=True):
        batch = micro_batch(rows, logprobs, old, advantages)
        losses = algorithm.rule.policy_loss(batch).token_losses
        losses = losses + kl_coef * token_kl(batch.logprobs, batch.old_logprobs - 0.1, "low_var_kl")
        total = total + (losses * token_weights(batch.train_counts, part)).sum()
    return total


# --- Hand-worked: two groups, of 2 and 3 episodes; each episode is one row and one call.
#
#     episode  group  reward  log π of its tokens   r = π / π_old
#     0        A      1       -1 -2                 1.5  0.9
#     1        A      0       -1 -1 -2              0.5  1.1  1.0
#     2        B      2       -.5 -.5               1.25 0.7
#     3        B      0       -1 -1 -1 -1           1.3  0.75 1.0 0.9
#     4        B      1       -3 -3                 2.0  0.5
#
# 13 tokens, 5 episodes, max_response_length 10.
#
# Group-relative: A has mean 0.5 and (unbiased) std √0.5 = 0.70711, so A0 = a, A1 = -a with a = 0.5 / 0.70711 = 0.70711.
# B has mean 1 and std 1, so A2 = 1, A3 = -1, A4 = 0.

REWARDS = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0])
GROUPS = torch.tensor([7, 7, 3, 3, 3])
LOGPROBS = [[-1, -2], [-1, -1, -2], [-0.5, -0.5], [-1, -1, -1, -1], [-3, -3]]
RATIOS = [[1.5, 0.9], [0.5, 1.1, 1.0], [1.25, 0.7], [1.3, 0.75, 1.0, 0.9], [2.0, 0.5]]


def hand_worked_loss(config: AlgorithmConfig) -> float:
    algorithm = resolve(config)
    assert algorithm.rule is not None
    logprobs = torch.tensor([value for row in LOGPROBS for value in row])
    old = logprobs - torch.tensor([math.log(value) for row in RATIOS for value in row])
    rows, place = [], 0
    for episode, values in enumerate(LOGPROBS):
        tokens = list(range(place, place + len(values)))
        rows.append(TrainingRow(tokens, [(0, len(values))], episode))
        place += len(values)
    lengths = torch.tensor([len(values) for values in LOGPROBS])
    advantages = algorithm.rule.advantages(REWARDS, GROUPS, lengths)
    return float(mini_batch_loss(algorithm, [rows], logprobs, old, advantages))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Clip 0.8 … 1.2; -min(rA, clip(r)A) is -A × the smaller of r and clip(r) for A > 0, the larger for A < 0.
        #   0: -a (1.2 + 0.9) / 2 = -1.05 a          1: a (0.8 + 1.1 + 1.0) / 3 = 0.966667 a
        #   2: -(1.2 + 0.7) / 2 = -0.95              3: (1.3 + 0.8 + 1.0 + 0.9) / 4 = 1.0        4: 0
        #   mean over 5: (-0.083333 × 0.70711 + 0.05) / 5
        (AlgorithmConfig(adv_estimator="grpo"), -0.0017851),
        # A = ±0.5 and 1, -1, 0: the same sums of tokens, over 5 × 10:
        #   (-0.5 × 2.1 + 0.5 × 2.9 - 1.9 + 4.0) / 50 = 2.5 / 50
        (AlgorithmConfig(adv_estimator="dr_grpo"), 0.05),
        # Clip 0.8 … 1.28, over 13 tokens: 0: -a (1.28 + 0.9), 1: 2.9 a, 2: -(1.25 + 0.7), 3: 4.0
        #   (0.72 × 0.70711 + 2.05) / 13
        (AlgorithmConfig(adv_estimator="dapo"), 0.1968551),
        # A0 = 1 - 0, A1 = 0 - 1, A2 = 2 - 0.5, A3 = 0 - 1.5, A4 = 1 - 1; sums of log π: -3, -4, -1, -4, -6.
        #   -(1 × -3 - 1 × -4 + 1.5 × -1 - 1.5 × -4) / 50 = -5.5 / 50
        (AlgorithmConfig(adv_estimator="rloo"), -0.11),
        # Baselines (2 × 1 + 3 × 0) / 5 = 0.4 and (2 × 2 + 4 × 0 + 2 × 1) / 8 = 0.75: A = 0.6 -0.4 1.25 -0.75 0.25.
        #   -(0.6 × -3 - 0.4 × -4 + 1.25 × -1 - 0.75 × -4 + 0.25 × -6) / 50 = -0.05 / 50
        (AlgorithmConfig(adv_estimator="opo"), -0.001),
        # All 5 rewards: mean 0.8, deviations 0.2 -0.8 1.2 -0.8 0.2, variance 2.8 / 4, g = 1 / √0.7 = 1.195229.
        #   sums of clipped terms 2.1, 2.9, 1.9, 4.0, 1.7 (1.2 + 0.5), over 13 tokens:
        #   g (-0.2 × 2.1 + 0.8 × 2.9 - 1.2 × 1.9 + 0.8 × 4.0 - 0.2 × 1.7) / 13 = 2.48 g / 13
        (AlgorithmConfig(adv_estimator="reinforce++"), 0.2280129),
        # Deviations from the groups' means 0.5 -0.5 1 -1 0, squares 2.5, g = 1 / √(2.5 / 4) = 1.264911.
        #   g (-0.5 × 2.1 + 0.5 × 2.9 - 1.9 + 4.0) / 13 = 2.5 g / 13
        (AlgorithmConfig(adv_estimator="reinforce++_baseline"), 0.2432521),
        # A = 0.5 / 0.5, -0.5 / 0.5, 1 / 1, -1 / 1, 0; the token means of grpo: (-1.05 + 0.966667 - 0.95 + 1.0) / 5
        (AlgorithmConfig(adv_estimator="maxrl"), -0.0066667),
        # Geometric means, with log r cut at 0.4 for A > 0 and raised to -0.4 for A < 0:
        #   0: √(e^0.4 × 0.9) = 1.158724   1: ∛(e^-0.4 × 1.1) = 0.903424   2: √0.875 = 0.935414   3: 0.8775^¼ = 0.967858
        #   (-1.158724 a + 0.903424 a - 0.935414 + 0.967858) / 5 = (-0.255300 × 0.70711 + 0.032444) / 5
        (AlgorithmConfig(adv_estimator="gmpo"), -0.0296161),
        # Gates 4 / τ σ(τ (r - 1)), τ 1 for A > 0 and 1.05 for A < 0; means over tokens:
        #   0: (2.489837 + 1.900083) / 2   1: (1.415938 + 2.004670 + 1.904762) / 3
        #   2: (2.248706 + 1.702230) / 2   3: (2.202306 + 1.656188 + 1.904762 + 1.804854) / 4
        #   (-2.194960 a + 1.775123 a - 1.975468 + 1.892027) / 5
        (AlgorithmConfig(adv_estimator="sapo"), -0.0760620),
        # s = geometric means: 0: √1.35 = 1.16190 → 1.0004; 1: ∛0.55 = 0.81932 → 0.9997 (A < 0: the larger);
        #   2: √0.875 = 0.935414, kept (A > 0: the smaller); 3: 0.8775^¼ = 0.96786 → 0.9997
        #   (-1.0004 a + 0.9997 a - 0.935414 + 0.9997) / 5 = (-0.0007 × 0.70711 + 0.064286) / 5
        (AlgorithmConfig(adv_estimator="gspo"), 0.0127582),
        # The same values, and other gradients.
        (AlgorithmConfig(adv_estimator="gspo_token"), 0.0127582),
        # Weights cut at 1.28 from above only: -A × sum of w log π
        #   0: a (1.28 + 1.8) = 3.08 a      1: -a (0.5 + 1.1 + 2.0) = -3.6 a
        #   2: 0.5 × 1.95 = 0.975           3: -(1.28 + 0.75 + 1.0 + 0.9) = -3.93
        #   (-0.52 × 0.70711 - 2.955) / 13
        (AlgorithmConfig(adv_estimator="cispo", clip_ratio_high=0.28), -0.2555920),
    ],
    ids=lambda value: value.adv_estimator if isinstance(value, AlgorithmConfig) else "",
)
def test_hand_worked(config, expected):
    # The epsilon of 1e-6 in the standard deviation, left out above, changes the seventh digit of the loss's terms.
    assert hand_worked_loss(config) == pytest.approx(expected, abs=1e-6)


# --- The published formulas. Their gradients are PyTorch's.

logprob = st.floats(-4, -0.01)
tokens = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=4)
answers = st.lists(
    st.builds(Answer, group=st.integers(0, 2), reward=st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0]), tokens=tokens),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("name", PUBLISHED)
@given(answers=answers)
@settings(max_examples=examples(40), deadline=None)
def test_published_formula(name: str, answers: list[Answer]):
    if name == "maxrl":
        answers = [replace(answer, reward=abs(answer.reward)) for answer in answers]
    algorithm = resolve(AlgorithmConfig(adv_estimator=name))
    assert algorithm.rule is not None
    table = torch.tensor([pair for answer in answers for pair in answer.tokens], dtype=torch.float64)
    rows, place = [], 0
    for episode, answer in enumerate(answers):
        rows.append(TrainingRow(list(range(place, place + len(answer.tokens))), [(0, len(answer.tokens))], episode))
        place += len(answer.tokens)
    advantages = algorithm.rule.advantages(
        torch.tensor([answer.reward for answer in answers]),
        torch.tensor([answer.group for answer in answers]),
        torch.tensor([len(answer.tokens) for answer in answers]),
    )
    logprobs = table[:, 0].clone().requires_grad_()
    loss = mini_batch_loss(algorithm, [rows], logprobs, table[:, 1], advantages, max_response_length=6)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    parts = [list(part) for part in logprobs.split([len(answer.tokens) for answer in answers])]
    expected = -published_objective(name, answers, parts, 6)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    published_gradient = torch.zeros_like(gradient)
    if expected.requires_grad:
        (published_gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(gradient, published_gradient, rtol=1e-5, atol=1e-6)


# --- Invariants: samples, order and micro-batches change neither the loss nor its gradient.


@st.composite
def step(draw: st.DrawFn) -> tuple[list[TrainingRow], list[list[TrainingRow]]]:
    """Episodes whose calls lie, and overlap, on one path: as one row each, and split over rows and micro-batches."""
    unsplit: list[TrainingRow] = []
    split: list[TrainingRow] = []
    place = 0
    for episode in range(draw(st.integers(1, 4))):
        length = draw(st.integers(2, 8))
        path = list(range(place, place + length))
        place += length
        spans = st.tuples(st.integers(1, length - 1), st.integers(1, 4)).map(
            lambda pair, length=length: (pair[0], min(pair[0] + pair[1], length))
        )
        calls = draw(st.lists(spans, min_size=1, max_size=5))
        unsplit.append(TrainingRow(path, calls, episode))
        homes = draw(st.lists(st.integers(0, 2), min_size=len(calls), max_size=len(calls)))
        for home in sorted(set(homes)):
            home_calls = [call for call, where in zip(calls, homes, strict=True) if where == home]
            split.append(TrainingRow(path[: max(end for _, end in home_calls)], home_calls, episode))
    draw(st.randoms(use_true_random=False)).shuffle(split)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(split) - 1)))))
    bounds = [0, *(cut for cut in cuts if cut < len(split)), len(split)]
    return unsplit, [split[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", REINFORCEMENT)
@given(mode=st.sampled_from(get_args(LossAggMode)), step=step(), seed=st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_splitting_changes_neither_loss_nor_gradient(name: str, mode: str, step, seed: int):
    unsplit, micro_batches = step
    # Wide enough for gspo that some calls are clipped and some are not.
    reinforcement = ALGORITHMS[name].reinforcement
    assert reinforcement is not None
    clip = {} if reinforcement.clip is None else {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    algorithm = resolve(AlgorithmConfig(adv_estimator=name, loss_agg_mode=mode, **clip))
    rng = random.Random(seed)
    size = sum(len(row.tokens) for row in unsplit)
    old = torch.tensor([rng.uniform(-3, -0.1) for _ in range(size)], dtype=torch.float64)
    drift = torch.tensor([rng.uniform(-0.5, 0.5) for _ in range(size)], dtype=torch.float64)
    advantages = torch.tensor([rng.choice([-1.0, 0.5, 2.0]) for _ in unsplit])

    results = []
    for layout in ([unsplit], micro_batches):
        logprobs = (old + drift).requires_grad_()
        loss = mini_batch_loss(algorithm, layout, logprobs, old, advantages, kl_coef=0.1)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        results.append((loss.detach(), gradient))
    (loss, gradient), (split_loss, split_gradient) = results
    torch.testing.assert_close(split_loss, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-6, atol=1e-7)
