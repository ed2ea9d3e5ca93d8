from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.llm_engine.embedded.request import Request, draw_key
from astuner.llm_engine.embedded.sampling import BatchSampler, uniforms
from astuner.schema import SamplingParams
from tests.examples import examples

CPU = torch.device("cpu")


def request(**params):
    return Request([0], 1, 10**9, SamplingParams(**params), lambda result: None)


def sample(logits, requests):
    tokens = BatchSampler(requests, CPU).sample(logits.clone())
    return [token.token_id for token in tokens], [token.logprob for token in tokens]


def test_uniforms_are_splitmix64():
    # The first outputs of the authors' reference implementation with seed 0.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    drawn = uniforms(np.zeros(3, dtype=np.uint64), np.arange(3, dtype=np.uint64))
    assert drawn.tolist() == [(output >> 24) / 2**40 for output in outputs]


def test_keys_of_neighbouring_seeds_are_unrelated():
    keys = np.array([draw_key(seed) for seed in range(4000)], dtype=np.uint64)
    first = uniforms(keys, np.zeros(4000, dtype=np.uint64))
    assert abs(first.mean() - 0.5) < 4 / math.sqrt(12 * 4000)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 4 / math.sqrt(4000)
    assert draw_key(7) == draw_key(7)
    assert draw_key(None) != draw_key(None)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([1.0, -2.0, 0.3, 2.0, -torch.inf])
    sampler = BatchSampler([request(seed=i, temperature=temperature) for i in range(1000)], CPU)
    counts = torch.zeros(5)
    for _ in range(20):
        ids = [token.token_id for token in sampler.sample(logits.repeat(1000, 1))]
        counts += torch.bincount(torch.tensor(ids), minlength=5)
    expected = (logits / temperature).softmax(-1) * 20_000
    assert counts[4] == 0
    # Chi-square with 3 degrees of freedom: above 16.3 once in a thousand.
    assert float(((counts - expected)[:4] ** 2 / expected[:4]).sum()) < 16.3


@given(
    seed=st.integers(0, 2**32),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 1.7]), st.sampled_from([-1, 1, 3, 50]), st.sampled_from([1.0, 0.9, 0.2])
        ),
        min_size=1,
        max_size=6,
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_do_not_depend_on_each_other(seed, rows):
    logits = torch.randn(len(rows), 11, generator=torch.Generator().manual_seed(seed)) * 3
    requests = [request(seed=seed + i, temperature=t, top_k=k, top_p=p) for i, (t, k, p) in enumerate(rows)]
    ids, logprobs = sample(logits, requests)
    alone = [sample(logits[i : i + 1], [r]) for i, r in enumerate(requests)]
    assert ids == [a[0][0] for a in alone]
    assert logprobs == [a[1][0] for a in alone]
    for i, (temperature, top_k, top_p) in enumerate(rows):
        scaled = (logits[i] / (temperature or 1)).log_softmax(-1)
        assert abs(logprobs[i] - float(scaled[ids[i]])) < 1e-6
        assert ids[i] in allowed(scaled.exp(), temperature, top_k, top_p)


def allowed(probabilities, temperature, top_k, top_p):
    """Return the ids that may be sampled, by a straightforward implementation."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if temperature == 0:
        return order[:1]
    if top_k > 0:
        order = order[:top_k]
    total, mass, nucleus = sum(float(probabilities[i]) for i in order), 0.0, []
    for i in order:
        if nucleus and mass >= top_p * total + 1e-9:
            break
        nucleus.append(i)
        mass += float(probabilities[i])
    return nucleus


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    penalty=st.sampled_from([0.0, 1.5]),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_logprobs_of_the_sampled_distribution(seed, temperature, top_k, top_p, penalty):
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(seed)) * 3
    again = request(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, presence_penalty=penalty)
    again.tokens.append(4)
    # The request without restrictions has no logprobs of its own, whatever its neighbour has.
    plain = request(seed=seed)
    restricted, whole = BatchSampler([again, plain], CPU).sample(logits.repeat(2, 1))
    assert whole.sampler_logprob is None
    if temperature == 0 or (top_k < 0 and top_p == 1 and penalty == 0):
        assert restricted.sampler_logprob is None
        return
    adjusted = logits[0].clone()
    adjusted[4] -= penalty
    probabilities = (adjusted / temperature).softmax(-1)
    kept = allowed(probabilities, temperature, top_k, top_p)
    expected = math.log(float(probabilities[restricted.token_id]) / sum(float(probabilities[i]) for i in kept))
    assert restricted.sampler_logprob == pytest.approx(expected, abs=1e-5)


def test_all_tokens_of_the_nucleus_are_sampled():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    sampled = {sample(logits[None], [request(seed=i, top_p=0.75)])[0][0] for i in range(200)}
    assert sampled == {0, 1, 2}
    sampled = {sample(logits[None], [request(seed=i, top_k=2)])[0][0] for i in range(200)}
    assert sampled == {0, 1}


def test_a_stream_resumes_where_it_stopped():
    # A request that is preempted and resumed samples the same tokens.
    logits = torch.zeros(1, 1000)
    uninterrupted = BatchSampler([request(seed=5)], CPU)
    drawn = [uninterrupted.sample(logits.clone())[0].token_id for _ in range(6)]
    resumed = request(seed=5)
    resumed.logprobs.extend([0.0] * 4)
    again = BatchSampler([resumed], CPU)
    assert [again.sample(logits.clone())[0].token_id for _ in range(2)] == drawn[4:]
    assert len(set(drawn)) > 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_nan(bad):
    logits = torch.zeros(2, 5)
    logits[0, 3] = bad
    ids, logprobs = sample(logits, [request(), request()])
    assert math.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(-math.log(5))
    assert 0 <= ids[0] < 5
