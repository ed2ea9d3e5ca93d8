"""However an update is computed, packed or not, what is learned is the same."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from astuner.algorithms.registry import resolve
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.policy import Optimizer, Policy
from astuner.backbone.local.update import PolicyUpdate, UpdateResult
from astuner.config.algorithms import ALGORITHMS
from astuner.config.model import ModelConfig
from astuner.config.root import AstunerConfig
from astuner.config.trainer import PackMode
from astuner.context_tracker.merge import build_samples
from astuner.schema import AgentStep, Episode, LlmCall, Task

REINFORCEMENT = [name for name in ALGORITHMS if name != "sft"]


class Watched(Optimizer):
    """Keeps the gradient of each step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gradients: list[Tensor] = []

    def step(self, step: int) -> float:
        self.gradients.append(torch.cat([parameter.grad.flatten() for parameter in self._parameters]))
        return super().step(step)


def sampled(policy: Policy, rng: random.Random, name: str, prompt: list[int], reward: float | None) -> LlmCall:
    """A call with the policy's logprobs and some noise, because an engine rounds differently."""
    completion = [rng.randrange(3, 60) for _ in range(rng.randrange(2, 7))]
    ids = torch.tensor([prompt + completion])
    selected = torch.tensor([[0] * len(prompt) + [1] * len(completion)])
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, ids, selected, 1.0)
    noisy = [value + rng.uniform(-0.005, 0.005) for value in logprobs[0, len(prompt) :].tolist()]
    return LlmCall(name, "e", tuple(prompt), tuple(completion), tuple(noisy), "stop", reward=reward)


def moved_policy(folder: Path, mode: PackMode) -> Policy:
    """The policy, away from the reference, so that there is a KL."""
    policy = Policy(ModelConfig(), str(folder), torch.device("cpu"), mode)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    return policy


@functools.cache
def episodes_of(folder: Path, *, by_call: bool, by_step: bool) -> list[Episode]:
    """Two groups of three: conversations with a retry, a repeated call and a fork."""
    policy = moved_policy(folder, "none")
    rng = random.Random(5)
    system = [rng.randrange(3, 60) for _ in range(20)]
    made = []
    for number in range(6):
        task = number // 3
        prompt = [*system, *[7 + task] * 5]
        calls: list[LlmCall] = []
        for turn in range(4):
            reward = rng.choice([0.0, 1.0, 2.0]) if by_call else None
            call = sampled(policy, rng, f"{number}/{turn}", prompt, reward)
            calls.append(replace(call, step=AgentStep(f"turn {turn}", float(number % 3 + turn))) if by_step else call)
            if turn != 1:  # after the second comes a retry
                prompt = [*prompt, *calls[-1].completion_ids, *[rng.randrange(3, 60) for _ in range(3)]]
        calls.append(replace(calls[0], call_id=f"{number}/again"))
        reward = sum(call.reward or 0.0 for call in calls) / 5 if by_call else float(number % 3)
        made.append(Episode(f"e{number}", Task(f"t{task}", "?"), number % 3, "ok", reward, True, tuple(calls)))
    return made


def step(
    folder: Path, algorithm: str, mode: PackMode, *, by_call: bool, correction: Mapping[str, object] | None = None
) -> tuple[list[Tensor], UpdateResult]:
    """The gradients of one training step of two mini-batches, and its result."""
    kl_in_reward = algorithm == "rloo"
    config = AstunerConfig.model_validate(
        {
            "data": {"max_response_length": 25},
            "rollout": {"temperature": 1.0},
            "update": {"pack": mode},
            "trainer_common": {
                "algorithm": {
                    "adv_estimator": algorithm,
                    "use_kl_in_reward": kl_in_reward,
                    "overlong_buffer_length": 0 if algorithm == "maxrl" else 20,
                },
                "use_kl_loss": algorithm in ("grpo", "gspo"),
                "mini_batch_num": 2,
                "correction": correction or {},
                "max_tokens_per_micro_batch": 150,
                "optim": {"lr": 1e-12},
            },
        }
    )
    policy = moved_policy(folder, mode)
    optimizer = Watched(policy.trainable(), config.trainer_common.optim, 1)
    merge = "none" if mode == "none" else "leaf"
    episodes = [
        replace(episode, samples=tuple(build_samples(episode.calls, merge)))
        for episode in episodes_of(folder, by_call=by_call, by_step=algorithm == "gigpo")
    ]
    result = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer).step(episodes, 1)
    return optimizer.gradients, result


# Packing knows neither algorithm nor rewards, so that one mode with each of them is enough.
@pytest.mark.parametrize(
    ("algorithm", "by_call", "mode"),
    [
        *((name, False, "tree" if index % 2 else "leaf") for index, name in enumerate(REINFORCEMENT)),
        *((name, True, "leaf" if index % 2 else "tree") for index, name in enumerate(REINFORCEMENT)),
        ("grpo", True, "auto"),
    ],
)
def test_packing_changes_no_reward_advantage_loss_or_gradient(
    model_folder: Path, algorithm: str, by_call: bool, mode: PackMode
):
    expected, result = step(model_folder, algorithm, "none", by_call=by_call)
    assert len(expected) == 2
    got, same = step(model_folder, algorithm, mode, by_call=by_call)
    exact = {"rloo": 1e-4}.get(algorithm, 0.0)  # the KL in its reward is rounded by the forward pass
    assert same.advantages == pytest.approx(result.advantages, rel=exact, abs=exact)
    assert same.metrics["reward/shaped"] == pytest.approx(result.metrics["reward/shaped"], rel=exact, abs=exact)
    assert same.metrics["loss/total"] == pytest.approx(result.metrics["loss/total"], rel=1e-5, abs=1e-6)
    for actual, other in zip(got, expected, strict=True):
        assert other.norm() > 1e-3
        assert (actual - other).norm() <= 1e-5 * other.norm()


@functools.cache
def uncorrected_gradients(folder: Path) -> list[Tensor]:
    return step(folder, "grpo", "none", by_call=False, correction={"mode": "none"})[0]


# The noise of `sampled` is within ±0.005, and so narrow bounds correct a part of the tokens.
@pytest.mark.parametrize(
    ("bounds", "is_masked"),
    [
        ({"mode": "token_tis", "max_weight": 1.001}, False),
        ({"mode": "seq_mis", "min_weight": 0.995, "max_weight": 1.005}, True),
        ({"mode": "geo_rs"}, True),
        ({"mode": "k3_rs_seq_tis", "max_rejection": 5e-6, "max_weight": 1.001}, True),
        ({"mode": "geo_rs", "old_logprobs": "sampler"}, True),
    ],
    ids=lambda bounds: bounds["mode"] if isinstance(bounds, dict) else "",
)
def test_packing_changes_no_correction(model_folder: Path, bounds: dict[str, object], is_masked: bool):
    expected, result = step(model_folder, "grpo", "none", by_call=False, correction=bounds)
    uncorrected = uncorrected_gradients(model_folder)
    assert 0.01 < result.metrics["correction/masked" if is_masked else "correction/truncated"] < 0.99
    got, same = step(model_folder, "grpo", "tree", by_call=False, correction=bounds)
    for actual, other, without in zip(got, expected, uncorrected, strict=True):
        assert (actual - other).norm() <= 1e-5 * other.norm()
        assert (without - other).norm() > 1e-4 * other.norm()
    for name in ("correction/masked", "correction/truncated", "correction/effective_sample_size"):
        assert same.metrics[name] == pytest.approx(result.metrics[name], abs=1e-5)


@pytest.mark.parametrize("apart", [False, True], ids=["by episode", "by agent"])
def test_a_length_punishment_revives_no_group_that_is_all_right(model_folder: Path, apart: bool):
    """DAPO leaves out groups whose rewards are equal before any shaping, those of agents too."""
    settings = {"adv_estimator": "dapo", "overlong_buffer_length": 10}
    config = AstunerConfig.model_validate(
        {"data": {"max_response_length": 15}, "trainer_common": {"algorithm": settings, "use_kl_loss": False}}
    )
    policy = Policy(ModelConfig(), str(model_folder), torch.device("cpu"))
    optimizer = Watched(policy.trainable(), config.trainer_common.optim, 1)
    episodes = []
    for number, length in enumerate((3, 14)):
        call = LlmCall("c", f"e{number}", (5, 6), (7,) * length, (-1.0,) * length, "stop", agent_name="a")
        call = replace(call, reward=1.0 if apart else None)
        rewards = {"agent_rewards": {"a": 1.0}} if apart else {}
        samples = tuple(build_samples([call]))
        episodes.append(Episode(f"e{number}", Task("t", "?"), number, "ok", 1.0, True, (call,), samples, **rewards))
    update = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer)
    result = update.step(episodes, 1)
    assert not result.signal
    assert result.metrics["reward/shaped"] < 1.0
    assert optimizer.gradients == []
