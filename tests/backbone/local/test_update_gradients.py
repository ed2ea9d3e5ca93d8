"""The gradient of a training step equals that of the algorithm's published formula, computed in float64."""

from __future__ import annotations

import random
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
from astuner.schema import Episode, LlmCall, Task
from tests.algorithms.published import PUBLISHED, Answer, published_objective

MAX_LENGTH = 9
PROMPT = 4


class KeepsGradient(Optimizer):
    """Keeps the gradient instead of making a step."""

    def step(self, step: int) -> float:
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in self._parameters])
        return 1.0


def float64_logprobs(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """Return log π of the tokens after the prompt."""
    tokens = torch.tensor([ids])
    logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[0, 1:, None])[PROMPT - 1 :, 0]


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


@pytest.mark.parametrize("pack", ["none", "tree"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_gradient_of_a_step_is_that_of_the_published_formula(model_folder: Path, name: str, pack: PackMode) -> None:
    config = AstunerConfig.model_validate(
        {
            "data": {"max_response_length": MAX_LENGTH},
            "update": {"pack": pack},
            "trainer_common": {
                "algorithm": {"adv_estimator": name},
                "use_kl_loss": False,
                "correction": {"mode": "none"},
            },
        }
    )
    policy = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), pack)
    ids, answers = answered(policy)
    episodes = []
    for number, (tokens, answer) in enumerate(zip(ids, answers, strict=True)):
        old = tuple(value for _, value in answer.tokens)
        call = LlmCall(f"{number}/0", f"e{number}", tuple(tokens[:PROMPT]), tuple(tokens[PROMPT:]), old, "stop")
        task = Task(f"t{answer.group}", "?")
        samples = tuple(build_samples((call,)))
        episodes.append(Episode(f"e{number}", task, number % 4, "ok", answer.reward, True, (call,), samples=samples))
    optimizer = KeepsGradient(policy.trainable(), config.trainer_common.optim, 1)
    update = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer)
    # The logprobs of the answers are not those of the policy, on purpose.
    update._check_logprob_gap = lambda *_: None  # type: ignore[method-assign]
    update.step(episodes, 1)

    model = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), "none").model.double()
    objective = published_objective(
        name, answers, [list(float64_logprobs(model, tokens)) for tokens in ids], MAX_LENGTH
    )
    (-objective).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])
    assert expected.norm() > 1e-2
    assert (optimizer.gradient.double() - expected).norm() <= 1e-5 * expected.norm()
