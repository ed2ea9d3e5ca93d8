"""The gradient of a training step equals that of the algorithm's published formula, computed in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from astuner.algorithms import resolve
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.optimizer import Optimizer
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.update import PolicyUpdate
from astuner.config.model import ModelConfig
from astuner.config.optimizer import PackMode
from astuner.config.root import AstunerConfig
from astuner.context_tracker import build_samples
from astuner.schema import AgentStep, Episode, LlmCall, Task
from tests.algorithms.published import (
    PUBLISHED,
    Answer,
    ppo_term,
    published_advantage,
    published_objective,
    published_step_advantages,
)

MAX_LENGTH = 9
PROMPT = 4


class KeepsGradient(Optimizer):
    """Keeps the gradient instead of making a step."""

    def step(self, step: int) -> float:
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in self._parameters])
        return 1.0


def float64_values(model: torch.nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return log π of the tokens after the prompt, and the entropies at their positions."""
    tokens = torch.tensor([ids])
    logprobs = model(input_ids=tokens).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, tokens[0, PROMPT:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def answered(policy: Policy) -> tuple[list[list[int]], list[Answer]]:
    """Return token ids and answers: two groups of four whose logprobs are off by up to ±0.5, so ratios are clipped."""
    rng = random.Random(3)
    ids, answers = [], []
    for number in range(8):
        length = rng.randrange(2, MAX_LENGTH)
        tokens = [number // 4 + 5] * PROMPT + [rng.randrange(3, 60) for _ in range(length)]
        mask = torch.tensor([[0] * PROMPT + [1] * length])
        with torch.no_grad():
            current, _ = token_logprobs(policy.model, torch.tensor([tokens]), mask, 1.0)
        old = [value + rng.uniform(-0.5, 0.5) for value in current[0, PROMPT:].tolist()]
        ids.append(tokens)
        answers.append(Answer(number // 4, float(number % 4 != 1), [(0.0, value) for value in old]))
    return ids, answers


def calls_of(number: int, tokens: list[int], answer: Answer, steps: list[tuple[str, float]]) -> tuple[LlmCall, ...]:
    """Return one call, or one for each step; the completion of the first one of these is one token."""
    old = [value for _, value in answer.tokens]
    bounds = [(PROMPT, PROMPT + 1), (PROMPT + 1, len(tokens))] if steps else [(PROMPT, len(tokens))]
    returns = [sum(reward for _, reward in steps[index:]) for index in range(len(steps))]
    return tuple(
        LlmCall(
            f"{number}/{index}",
            f"e{number}",
            tuple(tokens[:start]),
            tuple(tokens[start:end]),
            tuple(old[start - PROMPT : end - PROMPT]),
            "stop",
            step=AgentStep(steps[index][0], returns[index]) if steps else None,
        )
        for index, (start, end) in enumerate(bounds)
    )


def step_gradient(
    folder: Path,
    ids: list[list[int]],
    answers: list[Answer],
    algorithm: dict[str, object],
    pack: PackMode = "none",
    steps: list[list[tuple[str, float]]] | None = None,
) -> Tensor:
    """Return the gradient of a training step of one mini-batch.

    Args:
        folder: the folder of the model.
        ids: the token ids of each answer.
        answers: the answers.
        algorithm: the section of the algorithm.
        pack: the packing.
        steps: for each answer, the state and the reward of the steps of its two calls; None for one call.
    """
    config = AstunerConfig.model_validate(
        {
            "data": {"max_response_length": MAX_LENGTH},
            "update": {"pack": pack},
            "trainer_common": {"algorithm": algorithm, "use_kl_loss": False, "correction": {"mode": "none"}},
        }
    )
    policy = Policy(ModelConfig(), str(folder), torch.device("cpu"), pack)
    episodes = []
    for number, (tokens, answer) in enumerate(zip(ids, answers, strict=True)):
        calls = calls_of(number, tokens, answer, steps[number] if steps else [])
        task = Task(f"t{answer.group}", "?")
        samples = tuple(build_samples(calls))
        episodes.append(Episode(f"e{number}", task, number % 4, "ok", answer.reward, True, calls, samples=samples))
    optimizer = KeepsGradient(policy.trainable(), config.trainer_common.optim, 1)
    update = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer)
    # The logprobs of the answers are not those of the policy, on purpose.
    update._check_logprob_gap = lambda *_: None  # type: ignore[method-assign]
    update.step(episodes, 1)
    return optimizer.gradient.double()


def assert_gradient(gradient: Tensor, model: torch.nn.Module, loss: Tensor) -> None:
    """Compare with the gradient of a loss in float64."""
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert expected.norm() > 1e-2
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("pack", ["none", "tree"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_gradient_of_a_step_is_that_of_the_published_formula(model_folder: Path, name: str, pack: PackMode) -> None:
    ids, answers = answered(Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none"))
    gradient = step_gradient(model_folder, ids, answers, {"adv_estimator": name}, pack)
    model = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none").model.double()
    logprobs = [list(float64_values(model, tokens)[0]) for tokens in ids]
    assert_gradient(gradient, model, -published_objective(name, answers, logprobs, MAX_LENGTH))


@pytest.mark.parametrize("pack", ["none", "tree"])
def test_gradient_of_steps_from_equal_states(model_folder: Path, pack: PackMode) -> None:
    ids, answers = answered(Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none"))
    # The first steps of a task begin in one state, the second ones in two.
    steps = [[("start", float(n % 3)), (f"room {n % 2}", answer.reward)] for n, answer in enumerate(answers)]
    answers = [
        replace(answer, reward=sum(reward for _, reward in own)) for answer, own in zip(answers, steps, strict=True)
    ]
    settings: dict[str, object] = {"adv_estimator": "gigpo", "step_advantage_coef": 0.5}
    gradient = step_gradient(model_folder, ids, answers, settings, pack, steps)
    advantages = published_step_advantages(steps[:4], 0.5) + published_step_advantages(steps[4:], 0.5)
    model = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none").model.double()
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, answer, (first, second) in zip(ids, answers, advantages, strict=True):
        logprobs, _ = float64_values(model, tokens)
        for index, (new, (_, old)) in enumerate(zip(logprobs, answer.tokens, strict=True)):
            term = ppo_term((new - old).exp(), second if index else first, 0.2, 0.2)
            loss = loss - term / len(answer.tokens) / len(answers)
    assert_gradient(gradient, model, loss)


@pytest.mark.parametrize("pack", ["none", "tree"])
def test_entropy_bonus_and_high_entropy_tokens_in_float64(model_folder: Path, pack: PackMode) -> None:
    """Token means over 8 answers, as in grpo: the policy loss of the third of the tokens with the highest entropy."""
    ids, answers = answered(Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none"))
    model = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none").model.double()
    values = [float64_values(model, tokens) for tokens in ids]
    entropies = torch.cat([entropy for _, entropy in values]).detach()
    bound = float(entropies.sort(descending=True).values[math.floor(len(entropies) / 3 + 0.5) - 1])
    loss = torch.zeros((), dtype=torch.float64)
    for answer, (logprobs, entropy) in zip(answers, values, strict=True):
        advantage = published_advantage("grpo", answers, answer)
        weight = 1 / len(answers) / len(answer.tokens)
        for new, (_, old), value in zip(logprobs, answer.tokens, entropy, strict=True):
            if float(value.detach()) >= bound:
                loss = loss - ppo_term((new - old).exp(), advantage, 0.2, 0.2) * weight
            loss = loss - 0.05 * value * weight
    settings: dict[str, object] = {"adv_estimator": "grpo", "entropy_coef": 0.05, "high_entropy_share": 1 / 3}
    assert_gradient(step_gradient(model_folder, ids, answers, settings, pack), model, loss)
