"""The model in child processes: pickled, forked, and by its address."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from astuner.errors import CallLimitError, ContextLengthError, UnsupportedParameterError, WorkflowError
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.remote import RemoteModelTuner
from tests.gateway.conftest import MakeTuner

HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


def talk(model: Any) -> list[Any]:
    """Make two calls in a child process, the second of which extends the first."""

    async def turns() -> list[Any]:
        first = await model.chat(HI)
        second = await model.chat([*HI, first.call.messages[-1], {"role": "user", "content": "and?"}])
        return [first, second]

    return asyncio.run(turns())


def talk_as_openai(model: Any) -> str:
    with model.as_raw_openai_sdk_client(agent_name="child", sync=True) as client:
        return str(client.chat.completions.create(model="astuner", messages=HI).choices[0].message.content)


def error_of(model: Any, arguments: dict[str, Any]) -> str:
    try:
        asyncio.run(model.chat(**arguments))
    except Exception as error:
        return type(error).__name__
    return "none"


def put(queue: Any, function: Any, model: Any) -> None:
    queue.put(function(model))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_process_uses_the_model_of_the_episode(gateway: Gateway, make_tuner: MakeTuner, method: str):
    tuner = make_tuner(["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])
    context = multiprocessing.get_context(method)
    with gateway.episode(tuner):
        for function, model in ((talk, tuner.for_agent("solver")), (talk_as_openai, tuner)):
            queue = context.Queue()
            child = context.Process(target=put, args=(queue, function, model))
            child.start()
            result = queue.get(timeout=120)
            child.join(60)
            if function is talk:
                assert [answer.parsed.content for answer in result] == ["one", "two"]
                assert [answer.call for answer in result] == list(tuner.calls)
            else:
                assert result == "three"
    assert [call.agent_name for call in tuner.calls] == ["solver", "solver", "child"]
    first, second, _ = tuner.calls
    assert second.fork is None
    assert second.prompt_ids[: len(first.prompt_ids + first.completion_ids)] == first.prompt_ids + first.completion_ids


def test_a_pool_of_processes_gets_the_model_as_an_argument(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner([f"answer {number}<|im_end|>" for number in range(8)])
    context = multiprocessing.get_context("spawn")
    with gateway.episode(tuner), ProcessPoolExecutor(2, mp_context=context) as pool:
        results = list(pool.map(talk, [tuner] * 4))
    assert sorted(answer.call.call_id for result in results for answer in result) == sorted(
        call.call_id for call in tuner.calls
    )
    assert len(tuner.calls) == 8


async def test_an_unpickled_model_answers_as_the_model_itself(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner([CALL, "b<|im_end|>", "c<|im_end|>", "d<|im_end|>", "e<|im_end|>"])
    with gateway.episode(tuner):
        remote = pickle.loads(pickle.dumps(tuner))
        assert isinstance(remote, RemoteModelTuner)
        again = pickle.loads(pickle.dumps(remote.for_agent("solver", "default")))
        answer = await again.chat(HI, tools=TOOLS)
        assert answer.call == tuner.calls[0]
        assert answer.parsed.tool_calls[0].arguments == {"a": 1, "b": 2}
        several = await remote.chat(HI, n=2, top_logprobs=0)
        assert [one.parsed.content for one in (several, *several.alternatives)] == ["b", "c"]
        assert [one.call for one in (several, *several.alternatives)] == list(tuner.calls[1:])
        response = await remote(HI)
        assert response.content == [{"type": "text", "text": "d"}]
        base_url, api_key = remote.as_oai_baseurl_apikey("critic", "default")
        program = (
            "import openai; c = openai.OpenAI(); "
            "print(c.chat.completions.create(model='astuner', messages=[{'role': 'user', 'content': 'hi'}])"
            ".choices[0].message.content)"
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            env={"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            stdout=subprocess.PIPE,
        )
        output, _ = await child.communicate()
        assert output == b"e\n"
    assert [call.agent_name for call in tuner.calls] == ["solver", "", "", "", "critic"]


async def test_errors_are_those_of_the_model_itself(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(max_calls=1, max_prompt_length=50)
    with gateway.episode(tuner):
        remote = pickle.loads(pickle.dumps(tuner))
        with pytest.raises(UnsupportedParameterError, match="logit_bias") as caught:
            await remote.chat(HI, logit_bias={"1": 2})
        assert caught.value.name == "logit_bias"
        with pytest.raises(WorkflowError, match="robot"):
            await remote.chat([{"role": "robot", "content": "hi"}])
        with pytest.raises(WorkflowError, match="debug_model"):
            remote.for_agent("a", debug_model=print)
    tuner = make_tuner(max_calls=2, max_prompt_length=50)
    with gateway.episode(tuner):
        remote = pickle.loads(pickle.dumps(tuner))
        with pytest.raises(ContextLengthError):
            await remote.chat([{"role": "user", "content": "hi " * 100}])
        await remote.chat(HI)
        with pytest.raises(CallLimitError, match="max_steps"):
            await remote.chat(HI)
    with pytest.raises(WorkflowError, match="ended"):
        await remote.chat(HI)


def test_a_copy_of_the_model_is_the_model(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner()
    assert copy.copy(tuner) is tuner
    assert copy.deepcopy({"model": tuner})["model"] is tuner
    with pytest.raises(WorkflowError, match="not running"):
        pickle.dumps(tuner)


async def test_a_client_of_an_unpickled_model_is_served_by_the_gateway(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["3<|im_end|>", "4<|im_end|>"])
    with gateway.episode(tuner):
        remote = pickle.loads(pickle.dumps(tuner))
        async with remote.as_raw_openai_sdk_client("child") as client:
            answer = await client.chat.completions.create(model="astuner", messages=HI, logprobs=True)
            assert [token.token for token in answer.choices[0].logprobs.content] == ["3"]
            response = await client.responses.create(model="astuner", input="hi")
            assert response.output_text == "4"
            assert [model.id async for model in client.models.list()] == ["astuner"]
    assert [call.agent_name for call in tuner.calls] == ["child", "child"]
