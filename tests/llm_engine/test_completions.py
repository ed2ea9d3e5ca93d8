"""The HTTP engine returns the same tokens as the engine of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from astuner.errors import ContextLengthError, ModelError, UnsupportedParameterError
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import Completion, OutputConstraint, SamplingParams
from tests.llm_engine.completions_server import listening, serving

YES_OR_NO = OutputConstraint("response_format", 'start: %json {"enum": ["yes", "no"]}', '{"enum": ["yes", "no"]}')


@pytest.fixture(scope="module")
def embedded(model_folder: Path, tokenizer: Any) -> Iterator[EmbeddedEngine]:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    engine = EmbeddedEngine(model, max_model_len=64, tokenizer=tokenizer)
    yield engine
    engine.close()


def connect(url: str, **changes: Any) -> CompletionsEngine:
    settings: dict[str, Any] = {"model": None, "default_model": "some/model", "max_model_len": 1000, "api_key": None}
    return CompletionsEngine.connect(url, **(settings | changes))


def test_completions_equal_those_of_the_servers_engine(embedded: EmbeddedEngine):
    with serving(embedded) as url:
        engine = connect(url + "/")
        assert (engine.model, engine.max_model_len, engine.policy_version) == ("tiny", 64, 0)
        for params in (
            SamplingParams(temperature=1.0, max_tokens=8, seed=3),
            SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=100, seed=2**62 + 1),
            SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=tuple(range(500))),
            SamplingParams(max_tokens=30, seed=4, presence_penalty=0.5, frequency_penalty=-0.3),
            SamplingParams(max_tokens=30, seed=5, stop=("e", "a")),
            SamplingParams(max_tokens=6, seed=6, top_logprobs=3),
            SamplingParams(max_tokens=30, seed=7, constraint=YES_OR_NO),
        ):
            served = asyncio.run(engine.generate([1, 2, 3], params))
            direct = asyncio.run(embedded.generate([1, 2, 3], params))
            assert (served.token_ids, served.finish_reason) == (direct.token_ids, direct.finish_reason)
            assert served.logprobs == pytest.approx(direct.logprobs, abs=1e-5)
            tops = [[dict(top) for top in part.top_logprobs] for part in (served, direct)]
            assert tops[0] == [pytest.approx(top, abs=1e-5) for top in tops[1]]
            assert len(tops[0]) == (len(served.token_ids) if params.top_logprobs else 0)
        with pytest.raises(ContextLengthError, match="64 tokens"):
            asyncio.run(engine.generate([1] * 64, params))
        engine.close()


def test_a_key_is_sent_and_never_shown(embedded: EmbeddedEngine):
    with serving(embedded, api_key="secret") as url:
        engine = connect(url, api_key="secret")
        assert "secret" not in repr(engine)
        with pytest.raises(ModelError, match=r"was rejected \(401\).*set debug\.api_key_env"):
            connect(url)
        with pytest.raises(ModelError, match="check the key in that variable") as rejected:
            connect(url, api_key="wrong-one")
        assert "wrong-one" not in str(rejected.value)


def test_missing_parts_of_a_response_are_named(embedded: EmbeddedEngine):
    with (
        serving(embedded, leave_out=("token_ids",)) as url,
        pytest.raises(ModelError, match=r"no choices\[0\]\.token_ids; .*vLLM 0\.10\.2"),
    ):
        connect(url)
    with (
        serving(embedded, leave_out=("token_ids", "logprobs")) as url,
        pytest.raises(ModelError, match=r"token_ids and no logprobs\.token_logprobs"),
    ):
        connect(url)


def test_wrong_addresses_and_names(embedded: EmbeddedEngine):
    with serving(embedded) as url:
        with pytest.raises(ModelError, match=r"does not serve model 'other'; it serves: tiny\. Set debug"):
            connect(url, model="other")
        assert connect(url, model="tiny").model == "tiny"
        with pytest.raises(ModelError, match=r"not found \(404\).*end with the API version"):
            connect(url.removesuffix("/v1"))
        with pytest.raises(ModelError, match=r"completions failed \(422\)"):
            asyncio.run(connect(url).generate(["no id"], SamplingParams()))  # type: ignore[list-item]
    with listening() as sock, pytest.raises(ModelError, match="cannot be reached: ConnectError"):
        connect(f"http://127.0.0.1:{sock.getsockname()[1]}/v1")


class NeverAnswers:
    """An engine that does not respond until the test ends."""

    max_model_len = 64
    policy_version = 0

    def __init__(self) -> None:
        self.released = threading.Event()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        while not self.released.is_set():
            await asyncio.sleep(0.01)
        return Completion((1,), (0.0,), "length", 0)

    def close(self) -> None:
        """Respond to pending requests."""
        self.released.set()


def test_a_server_that_never_answers_times_out():
    with listening() as sock:
        sock.listen()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        with pytest.raises(ModelError, match=rf"{url}, did not answer GET /models within 0\.2 s; .*base_url_timeout"):
            connect(url, timeout=0.2)
    engine = NeverAnswers()
    with serving(engine) as url:
        with pytest.raises(ModelError, match=r"did not answer POST /completions within 0\.5 s"):
            connect(url, timeout=0.5)
        engine.close()


def test_a_required_tool_call_is_rejected(embedded: EmbeddedEngine):
    constrained = SamplingParams(constraint=OutputConstraint("tool_choice", 'start: "call"'))
    with serving(embedded) as url:
        engine = connect(url)
        with pytest.raises(UnsupportedParameterError, match="a model server does not") as caught:
            asyncio.run(engine.generate([1, 2], constrained))
    assert caught.value.name == "tool_choice"
