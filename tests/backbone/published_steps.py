"""Training steps of one mini-batch whose losses are computed from the papers' formulas in float64."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from astuner.algorithms.distillation.distiller import Distiller
from astuner.algorithms.distillation.teachers import ModelTeacher
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.policy import Policy
from astuner.config.algorithm_settings import DistillationConfig
from astuner.config.model import ModelConfig
from astuner.config.root import AstunerConfig
from astuner.context_tracker.merge import build_samples
from astuner.schema import AgentStep, Episode, Judgement, LlmCall, Task
from tests.algorithms.published import (
    PUBLISHED,
    Answer,
    ppo_term,
    published_advantage,
    published_component_advantages,
    published_objective,
    published_step_advantages,
)

MAX_LENGTH = 9
PROMPT = 4
STEPS = [*PUBLISHED, "gdpo", "gigpo", "entropy", "teacher"]
"""The names of the algorithms, `entropy`: grpo on tokens of high entropy, with an entropy bonus, and `teacher`: grpo
with a teacher."""

Loss = Callable[[torch.nn.Module], Tensor]


@dataclass(frozen=True)
class PublishedStep:
    """A training step.

    Attributes:
        algorithm: the section of the algorithm.
        episodes: two groups of four, whose logprobs are off by up to ±0.5, so that ratios are clipped.
        loss: returns the loss of the step under a model in float64.
        distiller: adds the advantages of a teacher; None without one.
    """

    algorithm: dict[str, object]
    episodes: list[Episode]
    loss: Loss
    distiller: Distiller | None = None

    def config(self, **sections: dict[str, object]) -> AstunerConfig:
        """Return a configuration with the algorithm, without a KL term and correction."""
        trainer: dict[str, object] = {"use_kl_loss": False, "correction": {"mode": "none"}, "algorithm": self.algorithm}
        if self.distiller is not None:
            trainer["distillation"] = self.distiller.config.model_dump()
        return AstunerConfig.model_validate(
            {"data": {"max_response_length": MAX_LENGTH}, "trainer_common": trainer, **sections}
        )


def plain_model(folder: Path) -> torch.nn.Module:
    """Return the model in float32."""
    return Policy(ModelConfig(), str(folder), torch.device("cpu"), "none").model


def published_step(name: str, folder: Path) -> PublishedStep:
    """Return the step of an entry of `STEPS` with the answers of a model."""
    ids, answers = _answers(plain_model(folder))
    if name == "entropy":
        settings: dict[str, object] = {"adv_estimator": "grpo", "entropy_coef": 0.05, "high_entropy_share": 1 / 3}
        return PublishedStep(settings, _episodes(ids, answers), lambda model: _entropy_loss(model, ids, answers))
    if name == "teacher":
        return _distillation(folder, ids, answers)
    if name == "gdpo":
        return _gdpo(ids, answers)
    if name == "gigpo":
        return _gigpo(ids, answers)

    def loss(model: torch.nn.Module) -> Tensor:
        logprobs = [list(_float64_values(model, tokens)[0]) for tokens in ids]
        return -published_objective(name, answers, logprobs, MAX_LENGTH)

    return PublishedStep({"adv_estimator": name}, _episodes(ids, answers), loss)


def assert_gradient(gradient: Tensor, step: PublishedStep, folder: Path) -> None:
    """Check that the gradient of all weights, in their order, is that of the step's loss in float64."""
    model = plain_model(folder).double()
    step.loss(model).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert expected.norm() > 1e-2
    assert (gradient.double() - expected).norm() <= 1e-5 * expected.norm()


def _float64_values(model: torch.nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return log π of the tokens after the prompt, and the entropies at their positions."""
    tokens = torch.tensor([ids])
    logprobs = model(input_ids=tokens).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, tokens[0, PROMPT:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def _answers(model: torch.nn.Module) -> tuple[list[list[int]], list[Answer]]:
    rng = random.Random(3)
    ids, answers = [], []
    for number in range(8):
        length = rng.randrange(2, MAX_LENGTH)
        tokens = [number // 4 + 5] * PROMPT + [rng.randrange(3, 60) for _ in range(length)]
        mask = torch.tensor([[0] * PROMPT + [1] * length])
        with torch.no_grad():
            current, _ = token_logprobs(model, torch.tensor([tokens]), mask, 1.0)
        old = [value + rng.uniform(-0.5, 0.5) for value in current[0, PROMPT:].tolist()]
        ids.append(tokens)
        answers.append(Answer(number // 4, float(number % 4 != 1), [(0.0, value) for value in old]))
    return ids, answers


def _episodes(
    ids: list[list[int]], answers: list[Answer], steps: list[list[tuple[str, float]]] | None = None
) -> list[Episode]:
    """Return the episodes of the answers; `steps` has the state and the reward of the steps of each, in two calls."""
    episodes = []
    for number, (tokens, answer) in enumerate(zip(ids, answers, strict=True)):
        calls = _calls(number, tokens, answer, steps[number] if steps else [])
        task, samples = Task(f"t{answer.group}", "?"), tuple(build_samples(calls))
        episodes.append(Episode(f"e{number}", task, number % 4, "ok", answer.reward, True, calls, samples=samples))
    return episodes


def _calls(number: int, tokens: list[int], answer: Answer, steps: list[tuple[str, float]]) -> tuple[LlmCall, ...]:
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


def _clipped_loss(
    model: torch.nn.Module, ids: list[list[int]], answers: list[Answer], advantages: Sequence[Sequence[float]]
) -> Tensor:
    """Return the loss of grpo, with an advantage of each token."""
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, answer, of_tokens in zip(ids, answers, advantages, strict=True):
        logprobs, _ = _float64_values(model, tokens)
        for new, (_, old), advantage in zip(logprobs, answer.tokens, of_tokens, strict=True):
            loss = loss - ppo_term((new - old).exp(), advantage, 0.2, 0.2) / len(answer.tokens) / len(answers)
    return loss


def _gigpo(ids: list[list[int]], answers: list[Answer]) -> PublishedStep:
    # The first steps of a task begin in one state, the second ones in two.
    steps = [[("start", float(n % 3)), (f"room {n % 2}", answer.reward)] for n, answer in enumerate(answers)]
    answers = [
        replace(answer, reward=sum(reward for _, reward in own)) for answer, own in zip(answers, steps, strict=True)
    ]
    advantages = published_step_advantages(steps[:4], 0.5) + published_step_advantages(steps[4:], 0.5)
    of_tokens = [
        [first] + [second] * (len(answer.tokens) - 1)
        for (first, second), answer in zip(advantages, answers, strict=True)
    ]
    settings: dict[str, object] = {"adv_estimator": "gigpo", "step_advantage_coef": 0.5}
    episodes = _episodes(ids, answers, steps)
    return PublishedStep(settings, episodes, lambda model: _clipped_loss(model, ids, answers, of_tokens))


def _gdpo(ids: list[list[int]], answers: list[Answer]) -> PublishedStep:
    components = [{"correct": answer.reward, "short": float(n % 3)} for n, answer in enumerate(answers)]
    weights = {"correct": 1.0, "short": 0.5}
    groups = [answer.group for answer in answers]
    advantages = published_component_advantages(groups, components, weights)
    of_tokens = [[value] * len(answer.tokens) for value, answer in zip(advantages, answers, strict=True)]
    episodes = [
        replace(episode, judgement=Judgement(episode.reward, True, parts))
        for episode, parts in zip(_episodes(ids, answers), components, strict=True)
    ]
    settings: dict[str, object] = {"adv_estimator": "gdpo", "component_weights": weights}
    return PublishedStep(settings, episodes, lambda model: _clipped_loss(model, ids, answers, of_tokens))


def _distillation(folder: Path, ids: list[list[int]], answers: list[Answer]) -> PublishedStep:
    teacher = plain_model(folder)
    with torch.no_grad():
        teacher.model.norm.weight.mul_(2)  # a sharper distribution
        scored = [_float64_values(copy.deepcopy(teacher).double(), tokens)[0].tolist() for tokens in ids]
    differences = [
        [value - old for value, (_, old) in zip(values, answer.tokens, strict=True)]
        for values, answer in zip(scored, answers, strict=True)
    ]
    mean = fmean(value for values in differences for value in values)
    of_tokens = [
        [0.5 * published_advantage("grpo", answers, answer) + 2.0 * (value - mean) for value in values]
        for values, answer in zip(differences, answers, strict=True)
    ]
    settings = DistillationConfig(teacher="folder", coef=2.0, reward_coef=0.5)
    # Only hints need a codec.
    distiller = Distiller(settings, ModelTeacher(teacher, 64), None)  # type: ignore[arg-type]
    return PublishedStep(
        {"adv_estimator": "grpo"},
        _episodes(ids, answers),
        lambda model: _clipped_loss(model, ids, answers, of_tokens),
        distiller,
    )


def _entropy_loss(model: torch.nn.Module, ids: list[list[int]], answers: list[Answer]) -> Tensor:
    """Return the loss of grpo on the third of the tokens with the highest entropy, less 0.05 × the entropy."""
    values = [_float64_values(model, tokens) for tokens in ids]
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
    return loss
