"""A small training loop of a user improves its policy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.tinker_server.served import Served, tinker


def reward_of(tokens: list[int]) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


@pytest.mark.parametrize(("rank", "lr", "loss"), [(8, 0.02, "importance_sampling"), (0, 0.02, "ppo")])
def test_reward_increases(served: Served, client: Any, rank: int, lr: float, loss: str):
    training = client.create_lora_training_client(served.model, rank=rank, seed=0).result()
    rng = random.Random(0)
    means = []
    for step in range(18):
        sampling = training.save_weights_and_get_sampling_client().result()
        prompts = [[rng.randrange(500) for _ in range(5)] for _ in range(8)]
        futures = [
            sampling.sample(
                tinker.ModelInput.from_ints(prompt),
                8,
                tinker.SamplingParams(max_tokens=4, temperature=1.0, seed=8 * step + number),
            )
            for number, prompt in enumerate(prompts)
        ]
        data, rewards = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            group = future.result().sequences
            group_rewards = [reward_of(sequence.tokens) for sequence in group]
            mean = sum(group_rewards) / len(group_rewards)
            rewards += group_rewards
            for sequence, reward in zip(group, group_rewards, strict=True):
                context, size = [0.0] * (len(prompt) - 1), len(sequence.tokens)
                data.append(
                    tinker.Datum(
                        model_input=tinker.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]]),
                        loss_fn_inputs={
                            "target_tokens": [*prompt[1:], *sequence.tokens],
                            "logprobs": [*context, *sequence.logprobs],
                            "advantages": [*context, *[(reward - mean) / size] * size],
                        },
                    )
                )
        means.append(sum(rewards) / len(rewards))
        passed = training.forward_backward(data, loss)
        training.optim_step(tinker.AdamParams(learning_rate=lr)).result()
        passed.result()
    assert means[0] < 0.65
    assert sum(means[-3:]) / 3 > 0.9, means
