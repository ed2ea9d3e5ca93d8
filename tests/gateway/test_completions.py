"""OpenAI's text completions at the gateway: prompts that are not rendered."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import InvalidRequestError
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.http_api.openai_completions import parse_completion_request
from astuner.model_tuner.targets import FrozenModel, Targets
from tests.gateway.conftest import MakeTuner


def test_a_prompt_is_sent_as_it_is(gateway: Gateway, make_tuner: MakeTuner, codec: ChatCodec):
    tuner = make_tuner([" three, four<|im_end|>", " three, four<|im_end|>", "<think>a</think> b<|im_end|>"])
    ids = tuple(codec.tokenizer.encode("one, two,", add_special_tokens=False))
    with gateway.episode(tuner), OpenAI(**connection(tuner)) as client:
        as_text = client.completions.create(model="astuner", prompt="one, two,", max_tokens=50, logprobs=0)
        stream = client.completions.create(model="astuner", prompt=list(ids), max_tokens=50, stream=True)
        streamed = "".join(chunk.choices[0].text for chunk in stream)
        thinking = client.completions.create(model="astuner", prompt="x", max_tokens=50)
    assert as_text.choices[0].text == streamed == " three, four"
    assert as_text.choices[0].finish_reason == "stop"
    assert as_text.choices[0].logprobs is not None
    assert "".join(as_text.choices[0].logprobs.tokens or []) == " three, four"
    assert thinking.choices[0].text == "<think>a</think> b"
    assert tuner.calls[0].prompt_ids == tuner.calls[1].prompt_ids == ids
    assert as_text.id == f"cmpl-{tuner.calls[0].call_id}"
    assert as_text.usage is not None
    assert as_text.usage.prompt_tokens == len(ids)
    assert certificate(tuner.calls, build_samples(tuner.calls)) == 1.0


def test_a_prompt_must_consist_of_characters():
    with pytest.raises(InvalidRequestError, match="surrogate"):
        parse_completion_request({"prompt": "\ud83d"})


def test_a_chat_does_not_continue_a_prompt(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["three<|im_end|>", "four<|im_end|>"])
    with gateway.episode(tuner), OpenAI(**connection(tuner)) as client:
        answer = client.completions.create(model="astuner", prompt="one, two,", max_tokens=50).choices[0].text
        messages: list[Any] = [
            {"role": "user", "content": "one, two,"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and?"},
        ]
        client.chat.completions.create(model="astuner", messages=messages)
    prompt, chat = tuner.calls
    assert chat.prompt_ids[: len(prompt.prompt_ids)] != prompt.prompt_ids


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [1, -1]}),
        ("prompt", {"prompt": [1, 10**9]}),
        ("logprobs", {"logprobs": 6}),
        ("echo", {"echo": True}),
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 3}),
        ("tools", {"extra_body": {"tools": []}}),
    ],
)
def test_what_cannot_be_honoured_is_named(
    gateway: Gateway, make_tuner: MakeTuner, name: str, parameters: dict[str, Any]
):
    tuner = make_tuner()
    with (
        gateway.episode(tuner),
        OpenAI(**connection(tuner)) as client,
        pytest.raises(openai.BadRequestError, match=name) as caught,
    ):
        client.completions.create(**{"model": "astuner", "prompt": "x", **parameters})
    assert caught.value.param == name
    assert tuner.calls == ()


def test_only_the_model_in_training_continues_a_prompt(gateway: Gateway, make_tuner: MakeTuner):
    frozen = {"helper": FrozenModel("helper", "http://127.0.0.1:9/v1", "none")}
    tuner = make_tuner(targets=Targets(("default",), frozen))
    with (
        gateway.episode(tuner),
        OpenAI(**connection(tuner)) as client,
        pytest.raises(openai.BadRequestError, match="prompt"),
    ):
        client.completions.create(model="helper", prompt="x")


def connection(tuner: Any) -> dict[str, Any]:
    base_url, api_key = tuner.as_oai_baseurl_apikey()
    return {"base_url": base_url, "api_key": api_key, "max_retries": 0}
