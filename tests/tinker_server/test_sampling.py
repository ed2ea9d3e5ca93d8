"""Sampling: weights, parameters, and batching of requests."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.tinker_server import sampling as sampling_module
from astuner.tinker_server.base_model import BaseLanguageModel
from astuner.tinker_server.service import Limits
from tests.tinker_server.served import Served, datum, logprobs_of, serving, tinker

RNG = random.Random(2)


def prompt(size: int) -> list[int]:
    return [RNG.randrange(500) for _ in range(size)]


def sampled(client: Any, ids: list[int], number: int = 1, **params: Any) -> list[Any]:
    sampling_params = tinker.SamplingParams(**{"max_tokens": 8, **params})
    return list(client.sample(tinker.ModelInput.from_ints(ids), number, sampling_params).result().sequences)


def assert_sampled_from(model: Any, ids: list[int], sequence: Any, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        expected = logprobs_of(model, [*ids, *sequence.tokens])[len(ids) - 1 :]
    assert (torch.tensor(sequence.logprobs) - expected).abs().max() <= tolerance


def train(training: Any, steps: int = 3, lr: float = 1e-2) -> None:
    for _ in range(steps):
        training.forward_backward([datum(prompt(20)) for _ in range(4)], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=lr)).result()


def test_logprobs_equal_the_models(served: Served, client: Any, fresh: Callable[[], Any]):
    sampling = client.create_sampling_client(base_model=served.model)
    model = fresh()
    for ids in [prompt(size) for size in (1, 7, 40)]:
        for sequence in sampled(sampling, ids, 3):
            assert_sampled_from(model, ids, sequence)


def test_prompt_logprobs(served: Served, client: Any, fresh: Callable[[], Any]):
    sampling = client.create_sampling_client(base_model=served.model)
    ids = prompt(12)
    first, *others = sampling.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()
    with torch.no_grad():
        expected = logprobs_of(fresh(), ids)
        logits = fresh()(input_ids=torch.tensor([ids])).logits[0]
    assert first is None
    torch.testing.assert_close(torch.tensor(others), expected, atol=1e-5, rtol=0)
    params = tinker.SamplingParams(max_tokens=1)
    response = sampling.sample(tinker.ModelInput.from_ints(ids), 1, params, topk_prompt_logprobs=3).result()
    none, *top = response.topk_prompt_logprobs
    assert none is None
    best = torch.log_softmax(logits[:-1], -1).topk(3)
    for place, pairs in enumerate(top):
        assert [token for token, _ in pairs] == best.indices[place].tolist()
        assert [value for _, value in pairs] == pytest.approx(best.values[place].tolist(), abs=1e-5)


def test_seeds_are_reproducible_and_samples_differ(served: Served, client: Any):
    sampling = client.create_sampling_client(base_model=served.model)
    ids = prompt(5)
    first, second = ([sequence.tokens for sequence in sampled(sampling, ids, 3, seed=5)] for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    assert sampled(sampling, ids, 1, seed=6)[0].tokens not in first
    greedy = [sampled(sampling, ids, 1, temperature=0.0)[0].tokens for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert sampled(sampling, ids, 1, top_k=1)[0].tokens == greedy[0]


def test_stop_tokens_and_strings(served: Served, client: Any):
    sampling = client.create_sampling_client(base_model=served.model)
    tokenizer = sampling.get_tokenizer()
    ids = prompt(5)
    (free,) = sampled(sampling, ids, temperature=0.0, max_tokens=30)
    assert (free.stop_reason, len(free.tokens)) == ("length", 30)
    (by_id,) = sampled(sampling, ids, temperature=0.0, max_tokens=30, stop=[free.tokens[6]])
    assert (by_id.stop_reason, by_id.tokens) == ("stop", free.tokens[: free.tokens.index(free.tokens[6]) + 1])
    text = tokenizer.decode(free.tokens[4:7])
    for stop in (text, ["not in the text", text]):
        (by_text,) = sampled(sampling, ids, temperature=0.0, max_tokens=30, stop=stop)
        assert by_text.stop_reason == "stop"
        assert by_text.tokens == free.tokens[: len(by_text.tokens)]
        assert text in tokenizer.decode(by_text.tokens)
        assert text not in tokenizer.decode(by_text.tokens[:-1])
    (unbounded,) = sampled(sampling, ids, max_tokens=None, seed=1)
    ended = served.service.base_model.stop_token_ids
    assert (unbounded.tokens[-1] in ended) if unbounded.stop_reason == "stop" else len(unbounded.tokens) == 512 - 5


@pytest.mark.parametrize("rank", [0, 4])
def test_sampling_uses_the_saved_weights(served: Served, client: Any, rank: int, fresh: Callable[[], Any]):
    training = client.create_lora_training_client(served.model, rank=rank)
    before = training.save_weights_and_get_sampling_client()
    train(training)
    named = client.create_sampling_client(training.save_weights_for_sampler("after").result().path)
    unnamed = training.save_weights_and_get_sampling_client()
    state = client.create_sampling_client(training.save_state("state").result().path)
    ids = prompt(6)
    for sampling in (named, unnamed, state):
        for sequence in sampled(sampling, ids, 2):
            # The forward pass of training agrees, although the sampler's adapters are merged.
            output = training.forward([datum([*ids, *sequence.tokens])], "cross_entropy").result().loss_fn_outputs[0]
            expected = output["logprobs"].to_torch()[len(ids) - 1 :]
            torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=1e-5, rtol=0)
        scored = sampling.compute_logprobs(tinker.ModelInput.from_ints([*ids, *sequence.tokens])).result()
        torch.testing.assert_close(torch.tensor(scored[1:]), output["logprobs"].to_torch(), atol=1e-5, rtol=0)
    for sequence in sampled(before, ids, 2):
        assert_sampled_from(fresh(), ids, sequence)


async def test_requests_are_batched(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path) as served:
        sampling = await asyncio.to_thread(lambda: served.client().create_sampling_client(base_model=served.model))
        # Long answers: a few requests that arrive late still share most of their steps with the others.
        params = tinker.SamplingParams(max_tokens=200, stop=None)
        inputs = [tinker.ModelInput.from_ints(prompt(10)) for _ in range(16)]
        answers = await asyncio.gather(*(sampling.sample_async(item, 2, params) for item in inputs))
        (sampler,) = served.service._samplers._samplers.values()
        sampled_tokens = sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)
        assert sampler.engine.stats.sampled_tokens == sampled_tokens > 1000
        assert sampler.engine.stats.steps < sampled_tokens / 4  # half of the tokens if requests ran one by one


async def test_sampling_continues_during_training(served: Served, client: Any):
    training = await client.create_lora_training_client_async(served.model, rank=0)
    sampling = await training.save_weights_and_get_sampling_client_async()
    before = copy.deepcopy(served.trained(training.model_id))
    ids = prompt(10)
    params = tinker.SamplingParams(max_tokens=30)
    concurrent_samples = asyncio.gather(
        *(sampling.sample_async(tinker.ModelInput.from_ints(ids), 2, params) for _ in range(10))
    )
    for _ in range(5):
        passed = await training.forward_backward_async([datum(prompt(20))], "cross_entropy")
        stepped = await training.optim_step_async(tinker.AdamParams(learning_rate=1e-2))
        await passed, await stepped
    for answer in await concurrent_samples:
        for sequence in answer.sequences:
            assert_sampled_from(before, ids, sequence)


async def test_one_engine_serves_several_sets_of_weights(
    base_model: BaseLanguageModel, tmp_path: Path, fresh: Callable[[], Any]
):
    with serving(base_model, tmp_path, Limits(engines=1)) as served:
        client = await asyncio.to_thread(served.client)
        models: list[Any] = [fresh()]
        samplings = [await client.create_sampling_client_async(base_model=served.model)]
        training = await client.create_lora_training_client_async(served.model, rank=2)
        for _ in range(2):
            await asyncio.to_thread(train, training, 1)
            samplings.append(await training.save_weights_and_get_sampling_client_async())
            models.append(copy.deepcopy(served.trained(training.model_id)))
        ids = prompt(9)
        params = tinker.SamplingParams(max_tokens=25)
        order = [0, 1, 2, 0, 2, 1, 0, 0, 1, 2, 2, 1]
        answers = await asyncio.gather(
            *(samplings[which].sample_async(tinker.ModelInput.from_ints(ids), 2, params) for which in order)
        )
        assert len(served.service._samplers._samplers) == 1
        for which, answer in zip(order, answers, strict=True):
            for sequence in answer.sequences:
                assert_sampled_from(models[which], ids, sequence)


FAILURES = {
    "an adapter that never arrives": "_proj.weight.*they are those from before the hand-over",
    "an engine that keeps old weights": "_proj.weight.*they are those from before the hand-over",
    "one corrupted tensor": r"1 of \d+ differ \(model.layers.1.mlp.up_proj.weight\); they changed on the way",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_sampler_without_the_trainers_weights_is_named(
    base_model: BaseLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
):
    load = FastForward.load

    def flips_a_bit(forward: FastForward, weights: Mapping[str, Tensor]) -> None:
        copies = {name: value.clone() for name, value in weights.items()}
        copies["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 5] ^= 1
        load(forward, copies)

    with serving(base_model, tmp_path, Limits(engines=1)) as served:
        client = served.client()
        training = client.create_lora_training_client(served.model, rank=2)
        sampled(training.save_weights_and_get_sampling_client(), prompt(4))
        train(training, 1, lr=1e-6)  # so small that the logprobs of the old weights look right
        if failure == "an adapter that never arrives":
            monkeypatch.setattr(sampling_module, "weights_with_adapters", lambda base, *_: base.weights())
        elif failure == "an engine that keeps old weights":
            monkeypatch.setattr(FastForward, "load", lambda forward, weights: None)
        else:
            monkeypatch.setattr(FastForward, "load", flips_a_bit)
        text = f"the sampler of the Tinker server does not have the trainer's weights: .*{FAILURES[failure]}"
        with pytest.raises(tinker.TinkerError, match=text):
            sampled(training.save_weights_and_get_sampling_client(), prompt(4))
