from __future__ import annotations

import pytest
import torch

from astuner.errors import ModelError
from astuner.llm_engine.embedded import scheduler as scheduler_module
from astuner.llm_engine.embedded.fallback_forward import CachedFallback
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.llm_engine.embedded.request import Request
from astuner.llm_engine.embedded.scheduler import Scheduler
from astuner.schema import Completion, SamplingParams

from .tiny_models import VOCAB, assert_exact, gemma2, qwen3, random_prompt

PLENTY = 10**9


class Counting:
    """A `Forward` that counts the computed tokens."""

    def __init__(self, forward):
        self._forward = forward
        self.extended = 0
        self.decoded = 0
        self.largest_batch = 0

    def __getattr__(self, name):
        return getattr(self._forward, name)

    def extend(self, chunks):
        self.extended += sum(len(chunk.token_ids) for chunk in chunks)
        self._forward.extend(chunks)

    def decode(self, groups):
        size = sum(len(group.sequences) for group in groups)
        self.decoded += size
        self.largest_batch = max(self.largest_batch, size)
        return self._forward.decode(groups)


@pytest.fixture(scope="module")
def model():
    return qwen3()


@pytest.fixture
def forward(model):
    return Counting(FastForward(model, 2048))


def make(forward, **changes):
    options = {"max_model_len": 2048, "max_num_seqs": 8, "prefix_cache_tokens": 10_000, "lane_tokens": PLENTY}
    return Scheduler(forward, **{**options, **changes})


class Call:
    """A submitted request and its results."""

    def __init__(self, scheduler, prompt, max_tokens=8, **params):
        self.prompt = prompt
        self.results = []
        self.params = SamplingParams(max_tokens=max_tokens, **{"seed": 1, **params})
        self.request = Request(list(prompt), len(prompt), len(prompt) + max_tokens, self.params, self.results.append)
        scheduler.submit(self.request)

    @property
    def completion(self) -> Completion:
        assert len(self.results) == 1
        assert isinstance(self.results[0], Completion)
        return self.results[0]

    def check(self, model):
        done = self.completion
        assert_exact(model, self.prompt, done.token_ids, done.logprobs, self.params.temperature or 1.0)


@torch.inference_mode()
def run(scheduler):
    while scheduler.in_flight or scheduler.num_waiting:
        scheduler.step()


@pytest.mark.parametrize("kind", ["fast", "fallback"])
def test_logprobs_are_exact_with_refills_and_different_lengths(kind):
    model = qwen3() if kind == "fast" else gemma2()
    forward = Counting(FastForward(model, 2048) if kind == "fast" else CachedFallback(model))
    scheduler = make(forward, max_num_seqs=5)
    requests = [
        Call(scheduler, random_prompt(1 + 13 * i % 40, seed=i), max_tokens=1 + 7 * i % 19, seed=i) for i in range(17)
    ]
    run(scheduler)
    assert forward.largest_batch == 5
    for each in requests:
        assert len(each.completion.token_ids) == each.params.max_tokens
        assert each.completion.finish_reason == "length"
        each.check(model)


def test_parameters_mix_in_one_batch(model, forward):
    scheduler = make(forward)
    prompt = random_prompt(12)
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 1},
    ]
    requests = [Call(scheduler, prompt, max_tokens=12, **setting) for setting in settings]
    run(scheduler)
    for each in requests:
        each.check(model)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert requests[0].completion.token_ids == tuple(greedy[0, 12:].tolist())


def test_seeded_samples_do_not_depend_on_other_requests(forward):
    prompt = random_prompt(20)
    alone = make(forward)
    first = Call(alone, prompt, max_tokens=30, seed=3)
    run(alone)
    crowd = make(forward, max_num_seqs=4)
    others = [Call(crowd, random_prompt(5 + i, seed=i), max_tokens=9, seed=None) for i in range(9)]
    again = Call(crowd, prompt, max_tokens=30, seed=3)
    run(crowd)
    assert again.completion.token_ids == first.completion.token_ids
    assert len({other.completion.token_ids for other in others}) == 9


def test_stop_tokens_end_a_completion_and_are_part_of_it(model, forward):
    scheduler = make(forward)
    free = Call(scheduler, random_prompt(6), max_tokens=20)
    run(scheduler)
    ids = free.completion.token_ids
    stop = ids[7]
    stopped = Call(scheduler, random_prompt(6), max_tokens=20, stop_token_ids=(VOCAB + 5, stop))
    run(scheduler)
    assert stopped.completion.token_ids == ids[: ids.index(stop) + 1]
    assert stopped.completion.finish_reason == "stop"
    stopped.check(model)


def test_the_next_turn_computes_only_new_tokens(model, forward):
    scheduler = make(forward)
    first = Call(scheduler, random_prompt(50), max_tokens=10)
    run(scheduler)
    computed = forward.extended + forward.decoded
    new = random_prompt(7, seed=9)
    second = Call(scheduler, [*first.prompt, *first.completion.token_ids, *new], max_tokens=5)
    run(scheduler)
    # The last sampled token was never computed; the last prompt token is part of the first decode step.
    assert forward.extended + forward.decoded - computed == 1 + 7 + 4
    assert scheduler.stats.reused_tokens == 59
    assert scheduler.stats.prompt_tokens == 50 + 67
    second.check(model)


def test_a_shared_prompt_is_computed_once(model, forward):
    scheduler = make(forward)
    prompt = random_prompt(60)
    requests = [Call(scheduler, prompt, max_tokens=4, seed=i) for i in range(8)]
    other = Call(scheduler, [*prompt[:50], *random_prompt(5, seed=4)], max_tokens=4)
    run(scheduler)
    assert forward.extended == 59 + 4
    for each in [*requests, other]:
        each.check(model)
    assert len({each.completion.token_ids for each in requests}) > 1


def test_without_a_prefix_cache_nothing_is_reused(model, forward):
    scheduler = make(forward, prefix_cache_tokens=0)
    requests = [Call(scheduler, random_prompt(30), max_tokens=4, seed=i) for i in range(3)]
    with torch.inference_mode():
        scheduler.step()
    assert forward.extended == 3 * 29  # in one pass: none of them waits for another
    run(scheduler)
    assert scheduler.stats.reused_tokens == 0
    for each in requests:
        each.check(model)


def test_long_prompts_are_computed_in_chunks(model, forward, monkeypatch):
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS_CPU", 64)
    scheduler = make(forward)
    requests = [Call(scheduler, random_prompt(length, seed=length), max_tokens=3) for length in (300, 20, 130)]
    run(scheduler)
    for each in requests:
        each.check(model)


def test_requests_move_to_larger_lanes(model, forward):
    scheduler = make(forward)
    # They move at different steps, which changes the order of the batch; each must keep its parameters.
    requests = [
        Call(scheduler, random_prompt(250 - 4 * i, seed=i), max_tokens=30, temperature=0.5 + i) for i in range(3)
    ]
    run(scheduler)
    for each in requests:
        each.check(model)


@pytest.mark.parametrize("prefix_cache_tokens", [0, 10_000])
def test_preemption_does_not_change_results(model, forward, prefix_cache_tokens):
    completions = []
    for lane_tokens in (PLENTY, 1100):
        scheduler = make(forward, lane_tokens=lane_tokens, prefix_cache_tokens=prefix_cache_tokens)
        requests = [Call(scheduler, random_prompt(250, seed=i), max_tokens=20, seed=i) for i in range(4)]
        before = forward.decoded
        run(scheduler)
        assert forward.decoded - before == 4 * 20
        assert scheduler.stats.prompt_tokens == 1000
        for each in requests:
            each.check(model)
        completions.append([each.completion.token_ids for each in requests])
    assert completions[0] == completions[1]


def test_running_requests_finish_while_none_is_admitted(forward):
    scheduler = make(forward, lane_tokens=600)
    running = [Call(scheduler, random_prompt(250, seed=i), max_tokens=20, seed=i) for i in range(2)]
    with torch.inference_mode():
        scheduler.step()
        late = Call(scheduler, random_prompt(4))
        while scheduler.in_flight:
            scheduler.step(admit=False)
    assert all(each.completion for each in running)
    assert late.results == []
    assert scheduler.num_waiting == 1


def test_cancelling_frees_the_lane(model, forward):
    scheduler = make(forward, max_num_seqs=2)
    requests = [Call(scheduler, random_prompt(10, seed=i), max_tokens=50) for i in range(4)]
    with torch.inference_mode():
        for _ in range(5):
            scheduler.step()
        scheduler.cancel(requests[0].request)
        scheduler.cancel(requests[2].request)
    run(scheduler)
    scheduler.cancel(requests[1].request)
    assert requests[0].results == requests[2].results == []
    requests[1].check(model)
    requests[3].check(model)
    assert scheduler.in_flight == 0


def test_cancelling_during_prefill(model, forward, monkeypatch):
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS_CPU", 16)
    scheduler = make(forward)
    prompt = random_prompt(100)
    first, twin = Call(scheduler, prompt), Call(scheduler, prompt)
    with torch.inference_mode():
        scheduler.step()
        scheduler.cancel(first.request)
    run(scheduler)
    assert first.results == []
    twin.check(model)


def test_diverged_weights_fail_the_request_and_do_not_affect_later_ones(model, forward):
    scheduler = make(forward, prefix_cache_tokens=0)
    healthy = {name: weight.clone() for name, weight in model.state_dict().items()}
    forward.load({name: weight * torch.nan for name, weight in healthy.items()})
    broken = [Call(scheduler, random_prompt(10, seed=i)) for i in range(3)]
    run(scheduler)
    for each in broken:
        assert isinstance(each.results[0], ModelError)
        assert "not finite" in str(each.results[0])
    forward.load(healthy)
    longer = [Call(scheduler, random_prompt(n, seed=77 + n)) for n in (3, 30, 9)]
    run(scheduler)
    for each in longer:
        each.check(model)


def test_fail_all_fails_every_request_once(forward):
    scheduler = make(forward, max_num_seqs=2)
    requests = [Call(scheduler, random_prompt(10, seed=i)) for i in range(4)]
    with torch.inference_mode():
        scheduler.step()
    scheduler.fail_all(ModelError("gone"))
    assert [str(each.results[0]) for each in requests] == ["gone"] * 4
    assert [len(each.results) for each in requests] == [1] * 4
