from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from astuner.errors import ContextLengthError, ModelError
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.protocol import LlmEngine
from astuner.schema import SamplingParams

from .tiny_models import VOCAB, assert_exact, gpt_neox, llama, mamba, qwen2, qwen3, random_prompt


@pytest.fixture
def start():
    """Return a function that creates engines, which are closed after the test."""
    engines = []

    def make(model=None, **options):
        engines.append(EmbeddedEngine(model or qwen3(), **{"max_model_len": 512, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


async def test_implements_the_protocol(start):
    model = qwen3()
    engine: LlmEngine = start(model)
    await asyncio.to_thread(engine.update_weights, model.state_dict(), 7)
    completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert len(completion.token_ids) == 4
    assert completion.policy_version == engine.policy_version == 7
    assert engine.max_model_len == 512


@pytest.mark.parametrize("make", [qwen3, qwen2, llama, gpt_neox, mamba])
async def test_logprobs_are_the_models(start, make):
    model = make()
    engine = start(model, max_num_seqs=6)
    prompts = [random_prompt(1 + 11 * i % 30, seed=i) for i in range(10)]
    params = SamplingParams(max_tokens=9, temperature=0.8)
    first = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    # The second turn extends the first, and uses the prefix cache.
    longer = [
        [*prompt, *done.token_ids, *random_prompt(5, seed=99)] for prompt, done in zip(prompts, first, strict=True)
    ]
    second = await asyncio.gather(*(engine.generate(prompt, params) for prompt in longer))
    for prompt, done in zip([*prompts, *longer], [*first, *second], strict=True):
        assert_exact(model, prompt, done.token_ids, done.logprobs, 0.8)
    assert (engine.stats.reused_tokens > 100) == (make is not mamba)


async def test_stats_count(start):
    engine = start()
    await engine.generate(random_prompt(20), SamplingParams(max_tokens=5))
    stats = engine.stats
    assert (stats.prompt_tokens, stats.sampled_tokens, stats.steps) == (20, 5, 5)


async def test_update_weights(start):
    old, new = qwen3(), qwen3(seed=1)
    engine = start(old)
    prompt, params = random_prompt(40), SamplingParams(max_tokens=6, seed=2)
    before = await engine.generate(prompt, params)
    assert_exact(old, prompt, before.token_ids, before.logprobs)
    await asyncio.to_thread(engine.update_weights, new.state_dict(), 5)
    assert engine.policy_version == 5
    reused = engine.stats.reused_tokens
    after = await engine.generate(prompt, params)
    # The cache of the old weights is not used.
    assert engine.stats.reused_tokens == reused
    assert after.policy_version == 5
    assert_exact(new, prompt, after.token_ids, after.logprobs)
    assert after.token_ids != before.token_ids


@pytest.mark.parametrize("make", [qwen3, gpt_neox])
async def test_requests_in_flight_keep_their_weights(start, make):
    old, new = make(), make(seed=1)
    reference = make()
    engine = start(old, max_num_seqs=3)
    prompts = [random_prompt(12, seed=i) for i in range(6)]
    decode, reached, resume = engine._forward.decode, threading.Event(), threading.Event()

    def decode_when_allowed(groups):
        if engine.stats.prompt_tokens >= 3 * 12:
            reached.set()
            resume.wait()
        return decode(groups)

    engine._forward.decode = decode_when_allowed
    requests = [asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=150))) for prompt in prompts]
    await asyncio.to_thread(reached.wait)
    update = asyncio.create_task(asyncio.to_thread(engine.update_weights, new.state_dict(), 1))
    while engine._inbox.empty():
        await asyncio.sleep(0.001)
    resume.set()
    answers = await asyncio.gather(*requests)
    await update
    versions = [answer.policy_version for answer in answers]
    # Usually the first three have the old version, but they may not arrive together.
    assert versions == sorted(versions)
    assert (versions[0], versions[-1]) == (0, 1)
    for prompt, answer in zip(prompts, answers, strict=True):
        model = new if answer.policy_version else reference
        assert_exact(model, prompt, answer.token_ids, answer.logprobs)


async def test_a_rejected_update_keeps_the_old_weights(start):
    model = qwen3()
    engine = start(model)
    new = dict(qwen3(seed=1).state_dict())
    new["lm_head.weight"] = new["lm_head.weight"] * 2
    with pytest.raises(ModelError, match="tied"):
        engine.update_weights(new, 1)
    answer = await engine.generate([1, 2], SamplingParams(max_tokens=5))
    assert answer.policy_version == 0
    assert_exact(model, [1, 2], answer.token_ids, answer.logprobs)


async def test_context_length(start):
    engine = start(max_model_len=20)
    full = await engine.generate(random_prompt(15), SamplingParams(max_tokens=50))
    assert len(full.token_ids) == 5
    assert full.finish_reason == "length"
    assert len((await engine.generate(random_prompt(19), SamplingParams())).token_ids) == 1
    with pytest.raises(ContextLengthError, match="20 tokens"):
        await engine.generate(random_prompt(20), SamplingParams())


async def test_the_models_positions_limit_the_context(start):
    engine = start(llama(max_position_embeddings=64), max_model_len=18_000)
    assert engine.max_model_len == 64
    assert len((await engine.generate([1], SamplingParams(max_tokens=500))).token_ids) == 63


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "at least one"),
        ([1, VOCAB], SamplingParams(), "token ids from 1 to 97"),
        ([-1], SamplingParams(), "token ids from -1"),
        ([1], SamplingParams(temperature=-0.1), "temperature"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
        ([1], SamplingParams(top_k=0), "top_k"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
    ],
)
async def test_invalid_requests_do_not_affect_others(start, prompt, params, message):
    engine = start()
    with pytest.raises(ModelError, match=message):
        await engine.generate(prompt, params)
    assert (await engine.generate([1], SamplingParams(max_tokens=2))).token_ids


async def test_cancelling_frees_the_lane(start):
    engine = start(max_num_seqs=1, max_model_len=2000)
    endless = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=1990)))
    while engine.stats.steps < 2:
        await asyncio.sleep(0.001)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    async with asyncio.timeout(5):
        await engine.generate([2], SamplingParams(max_tokens=2))
    assert engine.stats.sampled_tokens < 1990


async def test_close_fails_all_requests(start):
    engine = start(max_num_seqs=2)
    requests = [asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=400))) for _ in range(5)]
    await asyncio.sleep(0.02)
    await asyncio.to_thread(engine.close)
    engine.close()
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(answer, ModelError) and "closed" in str(answer) for answer in answers)
    with pytest.raises(ModelError, match="closed"):
        await engine.generate([1], SamplingParams())
    with pytest.raises(ModelError, match="closed"):
        engine.update_weights({}, 1)


async def test_a_failing_model_fails_all_requests(start, monkeypatch):
    model = gpt_neox()
    engine = start(model, max_num_seqs=2)
    await engine.generate([1], SamplingParams(max_tokens=2))

    def fail(**arguments):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(model, "forward", fail)
    requests = [asyncio.create_task(engine.generate([1, 2], SamplingParams())) for _ in range(5)]
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(answer, ModelError) and "no memory left" in str(answer) for answer in answers)
    assert all(isinstance(answer.__cause__, RuntimeError) for answer in answers)
    with pytest.raises(ModelError, match="no memory left"):
        await engine.generate([1], SamplingParams())
    with pytest.raises(ModelError, match="no memory left"):
        engine.update_weights(model.state_dict(), 1)


async def test_cancelling_while_the_model_fails_does_not_hang(start, monkeypatch):
    model = gpt_neox()
    engine = start(model)
    entered, leave = threading.Event(), threading.Event()

    def fail(**arguments):
        entered.set()
        leave.wait()
        raise RuntimeError("no memory left")

    requests = [asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=400))) for _ in range(3)]
    while engine.stats.steps < 2:
        await asyncio.sleep(0.001)
    monkeypatch.setattr(model, "forward", fail)
    await asyncio.to_thread(entered.wait)
    requests[0].cancel()
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate([3], SamplingParams()))
    await asyncio.sleep(0)
    leave.set()
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*requests[1:], late, return_exceptions=True)
    assert all(isinstance(answer, ModelError) and "no memory left" in str(answer) for answer in answers)


async def test_an_update_that_fails_midway_does_not_hang(start):
    engine = start()
    new = dict(qwen3(seed=1).state_dict())
    new["model.norm.weight"] = new["model.norm.weight"].to("meta")
    with pytest.raises(ModelError, match="embedded engine failed"):
        engine.update_weights(new, 1)
    with pytest.raises(ModelError, match="embedded engine failed"):
        await engine.generate([1], SamplingParams())


def test_the_number_of_threads_is_set_in_the_worker_only(start):
    def threads_of_a_new_thread():
        numbers = []
        thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return numbers[0]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = start()
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2
        number = Future()
        engine._post(lambda: number.set_result(torch.get_num_threads()))
        assert number.result() == 1
    finally:
        torch.set_num_threads(before)


def test_serves_several_event_loops(start):
    model = qwen3()
    engine = start(model, max_num_seqs=4)
    answers = {}

    def client(number):
        async def ask():
            prompts = [random_prompt(8, seed=10 * number + i) for i in range(6)]
            done = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=7)) for p in prompts))
            return list(zip(prompts, done, strict=True))

        answers[number] = asyncio.run(ask())

    threads = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(answers) == [0, 1, 2]
    for prompt, done in (pair for pairs in answers.values() for pair in pairs):
        assert_exact(model, prompt, done.token_ids, done.logprobs)


def test_a_closed_event_loop_does_not_affect_others(start):
    engine = start()

    async def leave():
        task = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=300)))
        while engine.stats.steps < 1:
            await asyncio.sleep(0.001)
        return task

    loop = asyncio.new_event_loop()
    abandoned = loop.run_until_complete(leave())
    loop.close()
    assert asyncio.run(engine.generate([2], SamplingParams(max_tokens=3))).token_ids
    while engine.stats.sampled_tokens < 303:
        time.sleep(0.001)
    assert not abandoned.done()
    abandoned._log_destroy_pending = False  # avoid asyncio's warning at garbage collection
    assert asyncio.run(engine.generate([2], SamplingParams(max_tokens=3))).token_ids


def test_a_program_may_exit_without_close():
    code = """
import asyncio
from transformers import LlamaConfig, LlamaForCausalLM
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import SamplingParams
async def main():
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    engine = EmbeddedEngine(LlamaForCausalLM(LlamaConfig(**shape)), max_model_len=2000)
    asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=1900)))
    while engine.stats.steps < 2:
        await asyncio.sleep(0.001)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_weights_of_large_models_are_used_in_place(start, monkeypatch):
    from astuner.llm_engine.embedded import fast_forward

    monkeypatch.setattr(fast_forward, "_FUSE_PARAMETERS", 0)
    model, new = qwen3(), qwen3(seed=1)
    engine = start(model)
    engine.update_weights(new.state_dict(), 1)
    assert torch.equal(model.lm_head.weight, new.lm_head.weight)
    prompt = random_prompt(9)
    answer = asyncio.run(engine.generate(prompt, SamplingParams(max_tokens=5)))
    assert_exact(new, prompt, answer.token_ids, answer.logprobs)
