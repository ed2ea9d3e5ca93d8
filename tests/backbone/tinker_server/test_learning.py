"""A small training loop with the client, as a user would write it, learns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.backbone.tinker_server.served import Served, tinker


def rewarded(tokens: list[int]) -> float:
    """Even tokens are what is wanted."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


@pytest.mark.parametrize(("rank", "lr", "loss"), [(8, 0.02, "importance_sampling"), (0, 0.02, "ppo")])
def test_a_policy_learns_what_is_rewarded(served: Served, client: Any, rank: int, lr: float, loss: str):
    training = client.create_lora_training_client(served.model, rank=rank, seed=0)
    rng = random.Random(0)
    params = tinker.SamplingParams(max_tokens=4, temperature=1.0)
    means = []
    for _ in range(25):
        sampling = training.save_weights_and_get_sampling_client()
        prompts = [[rng.randrange(500) for _ in range(5)] for _ in range(8)]
        asked = [sampling.sample(tinker.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, answer in zip(prompts, asked, strict=True):
            group = answer.result().sequences
            of_group = [rewarded(one.tokens) for one in group]
            mean = sum(of_group) / len(of_group)
            rewards += of_group
            for one, reward in zip(group, of_group, strict=True):
                context, said = [0.0] * (len(prompt) - 1), len(one.tokens)
                data.append(
                    tinker.Datum(
                        model_input=tinker.ModelInput.from_ints([*prompt, *one.tokens[:-1]]),
                        loss_fn_inputs={
                            "target_tokens": [*prompt[1:], *one.tokens],
                            "logprobs": [*context, *one.logprobs],
                            "advantages": [*context, *[(reward - mean) / said] * said],
                        },
                    )
                )
        means.append(sum(rewards) / len(rewards))
        passed = training.forward_backward(data, loss)
        training.optim_step(tinker.AdamParams(learning_rate=lr)).result()
        passed.result()
    assert means[0] < 0.65
    assert sum(means[-3:]) / 3 > 0.9, means
