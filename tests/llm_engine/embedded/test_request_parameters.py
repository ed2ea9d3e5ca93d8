"""Stop strings, penalties, top logprobs and constraints of the embedded engine, on a real model with its tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.errors import UnsupportedParameterError
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import Completion, OutputConstraint, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["sum", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CONSTRAINT = OutputConstraint("response_format", f"start: %json {json.dumps(SCHEMA)}")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def engine(model: Any, tokenizer: Any) -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(model, max_model_len=400, tokenizer=tokenizer)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.encode("What is 12 plus 30?", add_special_tokens=False)
    return ids


def logits(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    """[sampled tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return found


def assert_recomputable(model: Any, prompt: list[int], completion: Completion, temperature: float) -> None:
    """The logprobs are those of the model at the temperature, whatever restricted the sampling."""
    expected = (logits(model, prompt, completion) / (temperature or 1.0)).log_softmax(-1)
    chosen = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(4))
async def test_a_completion_ends_at_the_token_that_completes_a_stop_string(
    engine: EmbeddedEngine, model: Any, tokenizer: Any, prompt: list[int], seed: int
):
    params = SamplingParams(max_tokens=60, seed=seed)
    free = await engine.generate(prompt, params)
    text = tokenizer.decode(free.token_ids)
    stop = text[len(text) // 2 :][:3]
    before = engine.stats.sampled_tokens
    stopped = await engine.generate(prompt, SamplingParams(max_tokens=60, seed=seed, stop=(stop, "\0never")))
    assert stopped.finish_reason == "stop"
    count = len(stopped.token_ids)
    assert engine.stats.sampled_tokens - before == count < 60
    assert stopped.token_ids == free.token_ids[:count]
    assert stop in tokenizer.decode(stopped.token_ids)
    assert stop not in tokenizer.decode(stopped.token_ids[:-1])
    assert_recomputable(model, prompt, stopped, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
async def test_penalties_reduce_repetition_and_leave_the_logprobs(
    engine: EmbeddedEngine, model: Any, prompt: list[int], temperature: float
):
    def request(**penalties: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=80, seed=1, **penalties)

    free, frequency, presence, wanted = await asyncio.gather(
        *(
            engine.generate(prompt, request(**penalties))
            for penalties in ({}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0})
        )
    )
    repeats = [max(Counter(part.token_ids).values()) for part in (free, frequency, wanted)]
    assert repeats[1] < repeats[0] <= repeats[2]
    assert len(set(presence.token_ids)) > len(set(free.token_ids))
    for completion in (free, frequency, presence, wanted):
        assert_recomputable(model, prompt, completion, temperature)


async def test_greedy_sampling_follows_the_penalised_logits(engine: EmbeddedEngine, model: Any, prompt: list[int]):
    params = SamplingParams(temperature=0.0, max_tokens=30, frequency_penalty=0.7, presence_penalty=0.4)
    completion = await engine.generate(prompt, params)
    counts = torch.zeros(model.config.vocab_size)
    for token, row in zip(completion.token_ids, logits(model, prompt, completion), strict=True):
        penalised = row - 0.7 * counts - 0.4 * (counts > 0)
        assert penalised[token] >= penalised.max() - 1e-4
        counts[token] += 1


@pytest.mark.parametrize("temperature", [0.5, 1.0])
async def test_top_logprobs_are_the_most_likely_tokens(
    engine: EmbeddedEngine, model: Any, prompt: list[int], temperature: float
):
    """Other requests of the batch do not get them."""
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=3, top_logprobs=4)
    plain = SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    completion, other = await asyncio.gather(engine.generate(prompt, params), engine.generate(prompt, plain))
    assert other.token_ids == completion.token_ids
    assert other.top_logprobs == ()
    expected = (logits(model, prompt, completion) / temperature).log_softmax(-1).topk(4)
    assert [[token for token, _ in top] for top in completion.top_logprobs] == expected.indices.tolist()
    values = torch.tensor([[value for _, value in top] for top in completion.top_logprobs])
    torch.testing.assert_close(values, expected.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.2}, {"frequency_penalty": 1.0}])
async def test_a_constrained_completion_is_json_of_its_schema(
    engine: EmbeddedEngine, model: Any, tokenizer: Any, prompt: list[int], params: dict[str, Any]
):
    """Also next to requests without a constraint, whose tokens it does not change."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    requests = [
        SamplingParams(max_tokens=200, seed=seed, stop_token_ids=(end,), constraint=CONSTRAINT, **params)
        for seed in range(4)
    ]
    free = SamplingParams(max_tokens=40, seed=9)
    alone = await engine.generate(prompt, free)
    *constrained, beside = await asyncio.gather(*(engine.generate(prompt, item) for item in (*requests, free)))
    assert beside.token_ids == alone.token_ids
    for completion in constrained:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == end
        value = json.loads(tokenizer.decode(completion.token_ids[:-1]))
        assert sorted(value) == ["ok", "sum"]
        assert 0 <= value["sum"] <= 99
        assert_recomputable(model, prompt, completion, params.get("temperature", 1.0))


async def test_a_constrained_completion_without_end_tokens_ends_with_its_text(
    engine: EmbeddedEngine, tokenizer: Any, prompt: list[int]
):
    completion = await engine.generate(prompt, SamplingParams(max_tokens=200, seed=1, constraint=CONSTRAINT))
    assert completion.finish_reason == "stop"
    json.loads(tokenizer.decode(completion.token_ids))


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: %json {"type": "object", "not": {}}', "not"),
        ("start: nothing", "nothing"),
        ("}{", "cannot be enforced"),
    ],
)
async def test_a_constraint_that_cannot_be_compiled_is_rejected(
    engine: EmbeddedEngine, prompt: list[int], grammar: str, says: str
):
    params = SamplingParams(constraint=OutputConstraint("response_format", grammar))
    with pytest.raises(UnsupportedParameterError, match=says) as caught:
        await engine.generate(prompt, params)
    assert caught.value.name == "response_format"


async def test_without_a_tokenizer_constraints_are_rejected_and_stop_strings_ignored(model: Any):
    engine = EmbeddedEngine(model, max_model_len=100)
    try:
        with pytest.raises(UnsupportedParameterError, match="without a tokenizer"):
            await engine.generate([1, 2], SamplingParams(constraint=CONSTRAINT))
        completion = await engine.generate([1, 2], SamplingParams(max_tokens=5, stop=("a", "e")))
        assert len(completion.token_ids) == 5
    finally:
        engine.close()
