"""API keys: which are accepted. Requests with other keys record nothing."""

from __future__ import annotations

import base64
import pickle
import time

import httpx
import openai
import pytest
from openai import OpenAI

from astuner.errors import ServiceError, WorkflowError
from astuner.gateway.http_server import Gateway
from astuner.gateway.sessions import KeyClaims, KeySigner
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.remote import KEY_PATH
from astuner.model_tuner.tuner import ModelTuner
from astuner.system.redaction.redactor import redact
from tests.gateway.conftest import MakeTuner

HI = [{"role": "user", "content": "hi"}]


def ask(base_url: str, api_key: str) -> str | None:
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=2) as client:
        completion = client.chat.completions.create(model="astuner", messages=HI)  # type: ignore[arg-type]
        return completion.choices[0].message.content


def changed(key: str, position: int) -> str:
    prefix = len("sk-astuner-")
    text = key[prefix:]
    signed = bytearray(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    signed[position] ^= 1
    return key[:prefix] + base64.urlsafe_b64encode(bytes(signed)).rstrip(b"=").decode()


def test_forged_keys_are_rejected_and_record_nothing(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner()
    with gateway.episode(tuner):
        base_url, key = tuner.as_oai_baseurl_apikey(agent_name="a")
        forged = [changed(key, position) for position in (0, 31, 32, 40, -1)]
        foreign = KeySigner().sign(KeyClaims(1, "a", "default", None, float("inf")))
        for wrong in [*forged, foreign, key[:-4], key + "AAAA", "sk-astuner-", "sk-astuner-é", "sk-1234", "x" * 20_000]:
            response = httpx.post(
                f"{base_url}/chat/completions",
                headers={"Authorization": f"Bearer {wrong}".encode()},
                json={"model": "astuner", "messages": HI},
            )
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        without_key = httpx.post(f"{base_url}/chat/completions", json={"model": "astuner", "messages": HI})
        assert without_key.status_code == 401
        with pytest.raises(openai.AuthenticationError):
            ask(base_url, forged[0])
        assert tuner.calls == ()
        assert ask(base_url, key) == "hi"


def test_the_key_of_one_agent_gets_no_key_of_another(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner()
    with gateway.episode(tuner):
        base_url, key = tuner.as_oai_baseurl_apikey(agent_name="critic")
        response = httpx.post(
            base_url + KEY_PATH,
            headers={"Authorization": f"Bearer {key}"},
            json={"agent_name": "solver", "target_tag": "default"},
        )
        assert response.status_code == 403
        assert response.json()["error"]["message"] == "this API key is for one agent of the episode"
        remote = pickle.loads(pickle.dumps(tuner))
        assert ask(*remote.as_oai_baseurl_apikey(agent_name="solver")) == "hi"
    assert [call.agent_name for call in tuner.calls] == ["solver"]


def test_a_key_ends_with_its_episode(gateway: Gateway, make_tuner: MakeTuner):
    first, second = make_tuner(episode_id="first"), make_tuner(episode_id="second")
    with gateway.episode(second):
        other = second.as_oai_baseurl_apikey()
        with gateway.episode(first):
            endpoint = first.as_oai_baseurl_apikey()
            ask(*endpoint)
        with pytest.raises(openai.AuthenticationError, match="ended"):
            ask(*endpoint)
        with (
            OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
            pytest.raises(openai.AuthenticationError, match="ended"),
        ):
            client.models.list()
        assert ask(*other) == "hi"
    assert [call.episode_id for call in first.calls] == ["first"]
    assert [call.episode_id for call in second.calls] == ["second"]
    with pytest.raises(WorkflowError, match="not running"):
        first.as_oai_baseurl_apikey()


def test_a_key_of_another_gateway_is_rejected(gateway: Gateway, make_tuner: MakeTuner):
    other = Gateway()
    mine, theirs = make_tuner(), make_tuner(endpoints=other)
    try:
        with gateway.episode(mine), other.episode(theirs):
            base_url, _ = mine.as_oai_baseurl_apikey()
            _, key = theirs.as_oai_baseurl_apikey()
            with pytest.raises(openai.AuthenticationError):
                ask(base_url, key)
    finally:
        other.close()
    assert mine.calls == theirs.calls == ()


def test_a_key_expires():
    signer = KeySigner()
    now = time.monotonic()
    claims = signer.verify(signer.sign(KeyClaims(7, "solver", "default", None, now + 60)))
    assert claims is not None
    assert (claims.session, claims.agent_name, claims.target_tag) == (7, "solver", "default")
    assert signer.verify(signer.sign(KeyClaims(7, "solver", "default", None, now))) is None


def test_a_key_names_its_agent_and_target(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["a<|im_end|>", "b<|im_end|>"])
    with gateway.episode(tuner):
        ask(*tuner.as_oai_baseurl_apikey(agent_name="solver"))
        ask(*tuner.as_oai_baseurl_apikey(agent_name="critic", target_tag="judge"))
    assert [(call.agent_name, call.target_tag) for call in tuner.calls] == [("solver", "default"), ("critic", "judge")]


def test_a_key_is_redacted(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner()
    with gateway.episode(tuner):
        key = tuner.as_oai_baseurl_apikey().api_key
    assert key[20:] not in redact(f"the client was created with {key} and failed")


def test_a_tuner_without_a_gateway_has_no_address(codec: ChatCodec, make_tuner: MakeTuner, gateway: Gateway):
    engine = make_tuner().engine  # type: ignore[attr-defined]
    with pytest.raises(WorkflowError, match="gateway"):
        ModelTuner(engine, codec, CallSettings(), episode_id="e").as_oai_baseurl_apikey()
    closed = Gateway()
    closed.close()
    tuner = make_tuner(endpoints=closed)
    with closed.episode(tuner), pytest.raises(ServiceError, match="closed"):
        tuner.as_oai_baseurl_apikey()
