"""Sampling: weights, parameters, and batching of requests."""

from __future__ import annotations

import asyncio
import copy
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.tinker_server import sampling as sampling_module
from astuner.tinker_server.service import Limits
from astuner.tinker_server.trainable_model import BaseLanguageModel
from tests.tinker_server.served import Served, datum, logprobs_of, public_pb, serving, tinker

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
    sampling = client.create_sampling_client(base_model=served.model).result()
    model = fresh()
    for ids in [prompt(size) for size in (1, 7, 40)]:
        for sequence in sampled(sampling, ids, 3):
            assert_sampled_from(model, ids, sequence)


def test_prompt_logprobs(served: Served, client: Any, fresh: Callable[[], Any]):
    sampling = client.create_sampling_client(base_model=served.model).result()
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
    sampling = client.create_sampling_client(base_model=served.model).result()
    ids = prompt(5)
    first, second = ([sequence.tokens for sequence in sampled(sampling, ids, 3, seed=5)] for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    assert sampled(sampling, ids, 1, seed=6)[0].tokens not in first
    greedy = [sampled(sampling, ids, 1, temperature=0.0)[0].tokens for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert sampled(sampling, ids, 1, top_k=1)[0].tokens == greedy[0]


def test_stop_tokens_and_strings(served: Served, client: Any):
    sampling = client.create_sampling_client(base_model=served.model).result()
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
    training = client.create_lora_training_client(served.model, rank=rank).result()
    before = training.save_weights_and_get_sampling_client().result()
    train(training)
    named = client.create_sampling_client(training.save_weights_for_sampler("after").result().path).result()
    unnamed = training.save_weights_and_get_sampling_client().result()
    state = client.create_sampling_client(training.save_state("state").result().path).result()
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
        sampling = await asyncio.to_thread(
            lambda: served.client().create_sampling_client(base_model=served.model).result()
        )
        # Long answers: a few requests that arrive late still share most of their steps with the others.
        params = tinker.SamplingParams(max_tokens=200, stop=None)
        inputs = [tinker.ModelInput.from_ints(prompt(10)) for _ in range(16)]
        answers = await asyncio.gather(*(sampling.sample(item, 2, params) for item in inputs))
        (sampler,) = served.service._samplers._samplers.values()
        sampled_tokens = sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)
        assert sampler.engine.stats.sampled_tokens == sampled_tokens > 1000
        assert sampler.engine.stats.steps < sampled_tokens / 4  # half of the tokens if requests ran one by one


async def test_sampling_continues_during_training(served: Served, client: Any):
    training = await client.create_lora_training_client(served.model, rank=0)
    sampling = await training.save_weights_and_get_sampling_client()
    before = copy.deepcopy(served.trained(training.model_id))
    ids = prompt(10)
    params = tinker.SamplingParams(max_tokens=30)
    concurrent_samples = asyncio.gather(
        *(sampling.sample(tinker.ModelInput.from_ints(ids), 2, params) for _ in range(10))
    )
    for _ in range(5):
        passed = training.forward_backward([datum(prompt(20))], "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
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
        samplings = [await client.create_sampling_client(base_model=served.model)]
        training = await client.create_lora_training_client(served.model, rank=2)
        for _ in range(2):
            await asyncio.to_thread(train, training, 1)
            samplings.append(await training.save_weights_and_get_sampling_client())
            models.append(copy.deepcopy(served.trained(training.model_id)))
        ids = prompt(9)
        params = tinker.SamplingParams(max_tokens=25)
        order = [0, 1, 2, 0, 2, 1, 0, 0, 1, 2, 2, 1]
        answers = await asyncio.gather(
            *(samplings[which].sample(tinker.ModelInput.from_ints(ids), 2, params) for which in order)
        )
        assert len(served.service._samplers._samplers) == 1
        for which, answer in zip(order, answers, strict=True):
            for sequence in answer.sequences:
                assert_sampled_from(models[which], ids, sequence)


FAILURES = {
    "an adapter that never arrives": "_proj.weight.*they are those from before the sync",
    "an engine that keeps old weights": "_proj.weight.*they are those from before the sync",
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
        training = client.create_lora_training_client(served.model, rank=2).result()
        sampled(training.save_weights_and_get_sampling_client().result(), prompt(4))
        train(training, 1, lr=1e-6)  # so small that the logprobs of the old weights look right
        if failure == "an adapter that never arrives":
            monkeypatch.setattr(sampling_module, "weights_with_adapters", lambda base, *_: base.weights())
        elif failure == "an engine that keeps old weights":
            monkeypatch.setattr(FastForward, "load", lambda forward, weights: None)
        else:
            monkeypatch.setattr(FastForward, "load", flips_a_bit)
        text = f"the sampler of the Tinker server does not have the trainer's weights: .*{FAILURES[failure]}"
        with pytest.raises(tinker.TinkerError, match=text):
            sampled(training.save_weights_and_get_sampling_client().result(), prompt(4))


def test_scores_of_prompt_suffixes_targets_and_alternatives(served: Served, client: Any, fresh: Callable[[], Any]):
    sampling = client.create_sampling_client(base_model=served.model).result()
    ids = prompt(10)
    with torch.no_grad():
        logprobs = torch.log_softmax(fresh()(input_ids=torch.tensor([ids])).logits[0, :-1], dim=-1)
    targets = torch.full((9, 2), -1)
    targets[2, 0], targets[8, 0], targets[8, 1] = 7, 8, 9
    cells = [(2, 0), (8, 0), (8, 1)]
    params = tinker.SamplingParams(max_tokens=4, temperature=0.5, seed=3)
    for encode in (tinker.TensorData.from_torch, lambda ids: tinker.TensorData.from_torch_sparse(ids, pad_value=-1)):
        answer = sampling.sample(
            tinker.ModelInput.from_ints(ids),
            1,
            params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=encode(targets),
            prompt_alt_tokens_k=4,
            prompt_logprobs_last_n=3,
        ).result()
        assert answer.prompt_logprobs[:7] == [None] * 7
        expected = [logprobs[place, ids[place + 1]].item() for place in range(6, 9)]
        assert answer.prompt_logprobs[7:] == pytest.approx(expected, abs=1e-5)
        assert answer.topk_prompt_logprobs[:7] == [None] * 7
        assert [row[0][0] for row in answer.topk_prompt_logprobs[7:]] == logprobs[6:].argmax(-1).tolist()
        scored = answer.target_prompt_logprobs.to_torch()
        assert scored.count_nonzero() == len(cells)
        for row, column in cells:
            assert scored[row, column].item() == pytest.approx(logprobs[row, targets[row, column]].item(), abs=1e-5)
        drawn, drawn_logprobs = (
            item.to_torch().reshape(9, 4)
            for item in (answer.prompt_alt_tokens.tokens, answer.prompt_alt_tokens.logprobs)
        )
        torch.testing.assert_close(drawn_logprobs, logprobs.gather(1, drawn), atol=1e-5, rtol=0)
        assert len(set(map(tuple, drawn.tolist()))) > 1
        (sequence,) = answer.sequences
        assert sequence.sequence_id
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert len(top) == 3
            assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 4},
            "prompt_logprobs_last_n is 4, but the prompt has 4 tok",
        ),
        ({"prompt_logprobs_last_n": 2}, "set prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1.0], "dtype": "int64", "shape": [1, 1]}}, r"expected int64 \[3, K\]"),
        (
            {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [3, 1]}},
            "has 2 values; its shape nee",
        ),
        ({"target_prompt_logprobs": {"data": [1, 2, 999], "dtype": "int64", "shape": [3, 1]}}, "values from 1 to 999"),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [3, 2],
                    "sparse_crow_indices": [0, 1, 0, 1],
                    "sparse_col_indices": [0],
                }
            },
            "expected 4 that rise from 0 to the number of values, 1",
        ),
        ({"record_stability_info": True}, "record_stability_info is set, but stable_reinforce needs information"),
    ],
)
def test_invalid_scores(served: Served, fields: dict[str, Any], message: str):
    request = {"prompt": {"chunks": [{"tokens": [1, 2, 3, 4]}]}, "sampling_params": {}, "base_model": served.model}
    answer = httpx.post(f"{served.url}/api/v1/asample", json=request | fields)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["detail"])


def test_an_empty_list_of_stops_disables_the_end_tokens(served: Served, client: Any):
    sampling = client.create_sampling_client(base_model=served.model).result()
    ids = prompt(5)
    ends = served.service.base_model.stop_token_ids
    stopped, free = (
        sampled(sampling, ids, 4, temperature=5.0, max_tokens=400, seed=2, stop=stop) for stop in (None, [])
    )
    assert any(sequence.stop_reason == "stop" and sequence.tokens[-1] in ends for sequence in stopped)
    assert all((sequence.stop_reason, len(sequence.tokens)) == ("length", 400) for sequence in free)


def test_inflight_clients_follow_the_latest_weights(served: Served, client: Any, fresh: Callable[[], Any]):
    training = client.create_lora_training_client(served.model, rank=0).result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    train(training)
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    ids = prompt(6)
    for sampling in (first, second):
        for sequence in sampled(sampling, ids):
            assert_sampled_from(served.trained(training.model_id), ids, sequence)
    for sequence in sampled(snapshot, ids):
        assert_sampled_from(fresh(), ids, sequence)


def test_an_abandoned_sample_is_cancelled(served: Served, client: Any):
    sampling = client.create_sampling_client(base_model=served.model).result()
    params = tinker.SamplingParams(max_tokens=500, stop=[])
    futures = [sampling.sample(tinker.ModelInput.from_ints([1]), 8, params) for _ in range(4)]
    sampled(sampling, prompt(3), max_tokens=1)  # the engine has started with the others
    for future in futures:
        future.future().cancel()
    deadline = time.monotonic() + 120
    while any(not item.task.done() for item in served.service.futures._futures.values()):
        assert time.monotonic() < deadline, "the samples go on"
        time.sleep(0.05)
    assert any(item.task.cancelled() for item in served.service.futures._futures.values())
    assert sampled(sampling, prompt(3), max_tokens=1)[0].tokens


def test_clients_of_version_0_20_send_and_receive_json(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    tensors = {"target_tokens": {"data": [2, 3], "dtype": "int64"}, "weights": {"data": [1, 1], "dtype": "float32"}}
    row = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": tensors}
    data = {"data": [row], "loss_fn": "cross_entropy"}
    with httpx.Client(base_url=f"{served.url}/api/v1", timeout=60) as http:

        def result(path: str, request: dict[str, Any], accept: str) -> httpx.Response:
            future = http.post(path, json=request).json()
            return http.post("retrieve_future", json={"request_id": future["request_id"]}, headers={"Accept": accept})

        # The client accepts protobuf for these results, but its tensors are better off with JSON.
        for path, field in ("forward", "forward_input"), ("forward_backward", "forward_backward_input"):
            passed = result(path, {"model_id": training.model_id, field: data}, "application/x-protobuf").json()
            assert passed["metrics"]["loss:sum"] > 0
            assert passed["loss_fn_outputs"][0]["logprobs"]["shape"] == [2]
        sample = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "base_model": served.model, "num_samples": 2}
        sample["sampling_params"] = {"max_tokens": 3, "seed": 1}
        as_json = result("asample", sample, "application/json").json()
        as_protobuf = result("asample", sample, "application/x-protobuf")
    assert as_protobuf.headers["content-type"] == "application/x-protobuf"
    decoded = public_pb.SampleResponse.FromString(as_protobuf.content)
    for sequence, expected in zip(decoded.sequences, as_json["sequences"], strict=True):
        assert np.frombuffer(sequence.tokens, np.int32).tolist() == expected["tokens"]
        assert np.frombuffer(sequence.logprobs, np.float32).tolist() == pytest.approx(expected["logprobs"])
