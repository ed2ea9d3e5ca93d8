from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from astuner.errors import ContextLengthError, ModelError
from astuner.llm_engine.protocol import LlmEngine
from astuner.schema import Completion, SamplingParams
from tests.scripted_engine import ScriptedEngine


def echo(prompt, params):
    return prompt


async def test_returns_the_scripted_completion():
    engine: LlmEngine = ScriptedEngine(echo, 10)
    completion = await engine.generate([5, 6, 7], SamplingParams())
    assert completion == Completion((5, 6, 7), (-0.5, -0.5, -0.5), "stop", 0)


async def test_the_script_receives_the_parameters():
    engine = ScriptedEngine(lambda prompt, params: [params.seed], 10, policy_version=3)
    completion = await engine.generate([1], SamplingParams(seed=42))
    assert completion.token_ids == (42,)
    assert completion.policy_version == 3
    engine.policy_version = 4
    assert (await engine.generate([1], SamplingParams(seed=1))).policy_version == 4


@pytest.mark.parametrize(
    ("params", "limit", "expected", "reason"),
    [
        (SamplingParams(max_tokens=2), 10, (1, 2), "length"),
        (SamplingParams(max_tokens=4), 10, (1, 2, 3, 4), "stop"),
        (SamplingParams(), 7, (1, 2, 3), "length"),
        (SamplingParams(stop_token_ids=(2, 9)), 10, (1, 2), "stop"),
        (SamplingParams(stop_token_ids=(3,), max_tokens=2), 10, (1, 2), "length"),
        (SamplingParams(stop_token_ids=(3,), max_tokens=3), 10, (1, 2, 3), "stop"),
    ],
)
async def test_truncates_as_an_engine_does(params, limit, expected, reason):
    engine = ScriptedEngine(lambda prompt, params: [1, 2, 3, 4], limit)
    completion = await engine.generate([0, 0, 0, 0], params)
    assert (completion.token_ids, completion.finish_reason) == (expected, reason)


async def test_scripted_logprobs():
    engine = ScriptedEngine(echo, 10, logprobs=lambda prompt, ids: [-float(i) for i in ids])
    assert (await engine.generate([1, 2], SamplingParams(max_tokens=1))).logprobs == (-1.0,)
    wrong = ScriptedEngine(echo, 10, logprobs=lambda prompt, ids: [])
    with pytest.raises(ModelError, match="0 logprobs for 2 tokens"):
        await wrong.generate([1, 2], SamplingParams())


async def test_errors():
    engine = ScriptedEngine(echo, 3)
    with pytest.raises(ContextLengthError, match="3 tokens"):
        await engine.generate([1, 2, 3], SamplingParams())
    with pytest.raises(ModelError, match="no token"):
        await ScriptedEngine(lambda prompt, params: [], 3).generate([1], SamplingParams())
    engine.close()
    with pytest.raises(ModelError, match="closed"):
        await engine.generate([1], SamplingParams())


async def test_calls_interleave():
    order: list[str] = []

    async def call(name):
        order.append(f"{name} starts")
        await engine.generate([1], SamplingParams())
        order.append(f"{name} ends")

    engine = ScriptedEngine(echo, 3)
    await asyncio.gather(call("a"), call("b"))
    assert order[:2] == ["a starts", "b starts"]


def test_protocol_and_script_need_no_torch():
    code = (
        "import sys, astuner.llm_engine, astuner.llm_engine.protocol, tests.scripted_engine;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
