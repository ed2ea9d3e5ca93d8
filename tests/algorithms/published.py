"""The algorithms as their papers state them, as loops over answers and tokens in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from astuner.config.algorithms import ALGORITHMS

# sft has no rewards, gdpo has several, and gigpo has some for each step.
PUBLISHED = [name for name in ALGORITHMS if name not in ("sft", "gdpo", "gigpo")]


@dataclass(frozen=True)
class Answer:
    """An episode of the formulas: its group, its reward, and (log π, log π_old) of its tokens."""

    group: int
    reward: float
    tokens: list[tuple[float, float]]


def standardised(reward: float, rewards: list[float]) -> float:
    return (reward - fmean(rewards)) / (stdev(rewards) + 1e-6) if len(set(rewards)) > 1 else 0.0


def published_advantage(name: str, answers: list[Answer], answer: Answer) -> float:
    rewards = [other.reward for other in answers]
    group = [other.reward for other in answers if other.group == answer.group]
    mean = fmean(group)
    if name == "dr_grpo":
        return answer.reward - mean
    if name == "rloo":
        return answer.reward - (sum(group) - answer.reward) / (len(group) - 1) if len(group) > 1 else 0.0
    if name == "opo":
        peers = [other for other in answers if other.group == answer.group]
        lengths = [len(other.tokens) for other in peers]
        rewards = [other.reward for other in peers]
        return answer.reward - sum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / sum(
            lengths
        )
    if name == "reinforce++":
        return standardised(answer.reward, rewards)
    if name == "reinforce++_baseline":
        means = {g: fmean(other.reward for other in answers if other.group == g) for g in {a.group for a in answers}}
        centred = [other.reward - means[other.group] for other in answers]
        return (answer.reward - mean) / (stdev(centred) + 1e-6) if len(centred) > 1 else 0.0
    if name == "maxrl":
        return (answer.reward - mean) / mean if mean > 0 else 0.0
    return standardised(answer.reward, group)


def published_step_advantages(steps: list[list[tuple[str, float]]], coef: float) -> list[list[float]]:
    """GiGPO's A = A^E + ω A^S (arXiv:2505.10978) for the steps of the episodes of one task.

    Args:
        steps: for each episode, the state before each step, and its reward. The discount is 1.
        coef: ω.
    """
    totals = [sum(reward for _, reward in episode) for episode in steps]
    returns: dict[str, list[float]] = {}
    for episode in steps:
        for index, (state, _) in enumerate(episode):
            returns.setdefault(state, []).append(sum(reward for _, reward in episode[index:]))
    return [
        [
            standardised(total, totals)
            + coef * standardised(sum(reward for _, reward in episode[index:]), returns[state])
            for index, (state, _) in enumerate(episode)
        ]
        for episode, total in zip(steps, totals, strict=True)
    ]


def published_component_advantages(
    groups: list[int], components: list[dict[str, float]], weights: dict[str, float]
) -> list[float]:
    """GDPO (arXiv:2601.05242): the weighted sum of the components' advantages in the group, normalised over the batch.

    Args:
        groups: the group of each episode.
        components: the components of the reward of each episode.
        weights: the weights of the components.
    """
    sums = [
        sum(
            weight
            * standardised(own[name], [other[name] for g, other in zip(groups, components, strict=True) if g == group])
            for name, weight in weights.items()
        )
        for group, own in zip(groups, components, strict=True)
    ]
    return [(value - fmean(sums)) / (stdev(sums) + 1e-6) for value in sums]


def ppo_term(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    clipped = torch.as_tensor(min(max(float(ratio.detach()), 1 - low), 1 + high), dtype=torch.float64)
    is_clipped = float(clipped) * advantage < float(ratio.detach()) * advantage
    return (clipped if is_clipped else ratio) * advantage


def gmpo_term(log_ratios: list[Tensor], advantage: float) -> Tensor:
    """Equation 4 of arXiv:2507.20673: the product of min(r^s, clip(r, e^-0.4, e^0.4)^s), s = sgn(A), to 1 / n."""
    sign = math.copysign(1.0, advantage)
    product = torch.ones((), dtype=torch.float64)
    for log_ratio in log_ratios:
        clipped = torch.tensor(min(max(float(log_ratio.detach()), -0.4), 0.4), dtype=torch.float64)
        is_clipped = float(clipped) * sign < float(log_ratio.detach()) * sign
        product = product * abs((clipped if is_clipped else log_ratio).exp() ** sign)
    return (product**sign) ** (1 / len(log_ratios)) * advantage


def published_objective(name: str, answers: list[Answer], logprobs: list[list[Tensor]], max_length: int) -> Tensor:
    """J(θ), to be maximised. `logprobs` are log π of the answers' tokens."""
    n_tokens = sum(len(answer.tokens) for answer in answers)
    total = torch.zeros((), dtype=torch.float64)
    for answer, current in zip(answers, logprobs, strict=True):
        advantage = published_advantage(name, answers, answer)
        log_ratios = [new - old for new, (_, old) in zip(current, answer.tokens, strict=True)]
        ratios = [log_ratio.exp() for log_ratio in log_ratios]
        mean_of_answer, mean_of_tokens = 1 / len(ratios) / len(answers), 1 / n_tokens
        by_length = 1 / max_length / len(answers)
        if name in ("grpo", "maxrl"):
            total += sum(ppo_term(r, advantage, 0.2, 0.2) for r in ratios) * mean_of_answer
        elif name == "dr_grpo":
            total += sum(ppo_term(r, advantage, 0.2, 0.2) for r in ratios) * by_length
        elif name == "dapo":
            total += sum(ppo_term(r, advantage, 0.2, 0.28) for r in ratios) * mean_of_tokens
        elif name in ("rloo", "opo"):
            total += advantage * sum(current) * by_length
        elif name in ("reinforce++", "reinforce++_baseline"):
            total += sum(ppo_term(r, advantage, 0.2, 0.2) for r in ratios) * mean_of_tokens
        elif name == "gspo":
            total += ppo_term(math.prod(ratios) ** (1 / len(ratios)), advantage, 3e-4, 4e-4) / len(answers)
        elif name == "gspo_token":
            of_answer = (math.prod(ratios) ** (1 / len(ratios))).detach()
            terms = [ppo_term(of_answer * r / r.detach(), advantage, 3e-4, 4e-4) for r in ratios]
            total += sum(terms) * mean_of_answer
        elif name == "gmpo":
            total += gmpo_term(log_ratios, advantage) / len(answers)
        elif name == "sapo":
            t = 1.0 if advantage > 0 else 1.05
            total += sum(4 / t / (1 + (-t * (r - 1)).exp()) for r in ratios) * advantage * mean_of_answer
        elif name == "cispo":
            total += (
                sum(min(float(r.detach()), 5.0) * advantage * new for r, new in zip(ratios, current, strict=True))
                * mean_of_tokens
            )
        else:
            raise AssertionError(f"{name} is new; add its formulas to published_advantage and published_objective")
    return total
