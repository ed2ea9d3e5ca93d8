"""The parameters of a chat request: which are honoured, recorded, replaced and rejected."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import CallLimitError, InvalidRequestError, UnsupportedParameterError
from astuner.model_tuner.chat_options import CallSettings, ChatOptions
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import SamplingParams
from tests.scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=["qwen3", "auto"])
def codec(request: pytest.FixtureRequest, tokenizer: Any) -> ChatCodec:
    """The qwen3 renderer, and the tokenizer's template with the template bridge."""
    return ChatCodec(tokenizer, request.param)


class Recorder:
    """A tuner whose model gives `answers`, and the parameters of its engine's requests."""

    def __init__(self, codec: ChatCodec, answers: Sequence[str] = (), **settings: Any) -> None:
        self.requests: list[SamplingParams] = []
        self._left = [codec.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        self._end = codec.stop_token_ids[0]
        engine = ScriptedEngine(self._answer, 4096)
        self.tuner = ModelTuner(engine, codec, CallSettings(**settings), episode_id="e", seed=1)

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        self.requests.append(params)
        return self._left.pop(0) if self._left else [self._end]


async def test_the_parameters_of_a_request_reach_the_engine_and_the_record(codec: ChatCodec):
    recorder = Recorder(codec, temperature=0.9, top_p=0.8, max_tokens=50)
    answer = await recorder.tuner.chat(HI, temperature=0.3, top_k=5, max_tokens=7, seed=11, stop="\n\n")
    (params,) = recorder.requests
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 0.8, 5)
    assert (params.max_tokens, params.seed, params.stop) == (7, 11, ("\n\n",))
    assert answer.call.sampling == params


async def test_seeds_by_prompt_do_not_depend_on_the_order_of_calls(codec: ChatCodec):
    def by_prompt(recorder: Recorder, calls: Sequence[str]) -> dict[str, list[int | None]]:
        seeds: dict[str, list[int | None]] = {}
        for call, params in zip(calls, recorder.requests, strict=True):
            seeds.setdefault(call, []).append(params.seed)
        return seeds

    orders = [["a", "b", "a", "c"], ["c", "a", "a", "b"]]
    found = []
    for seeds_by_prompt in (True, False):
        for order in orders:
            recorder = Recorder(codec, seeds_by_prompt=seeds_by_prompt)
            for content in order:
                await recorder.tuner.chat([{"role": "user", "content": content}])
            found.append(by_prompt(recorder, order))
            assert len({params.seed for params in recorder.requests}) == 4
    assert found[0] == found[1]
    assert found[2] != found[3]


async def test_none_and_missing_parameters_have_the_values_of_the_run(codec: ChatCodec):
    recorder = Recorder(codec, temperature=0.9, top_p=0.8, top_k=3, max_tokens=50)
    given = dict.fromkeys(
        ["temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n", "logprobs", "tool_choice"]
    )
    await recorder.tuner.chat(HI, **given)
    await recorder.tuner.chat(HI)
    for params in recorder.requests:
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.9, 0.8, 3, 50)
    assert recorder.requests[0].seed != recorder.requests[1].seed


@pytest.mark.parametrize("kind", [InvalidRequestError, UnsupportedParameterError])
def test_the_errors_keep_their_name_between_processes(kind: type[InvalidRequestError]):
    error = pickle.loads(pickle.dumps(kind("what and how", "seed")))
    assert (type(error), str(error), error.name) == (kind, "what and how", "seed")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", "hot", "from 0 to 2"),
        ("temperature", float("nan"), "from 0 to 2"),
        ("temperature", True, "from 0 to 2"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.1, "from 0 to 1"),
        ("top_k", -2, "from -1"),
        ("max_tokens", 0, "from 1"),
        ("max_tokens", 2.5, "an integer"),
        ("stop", ["a"] * 5, "at most 4"),
        ("stop", "", "empty"),
        ("stop", [3], "strings"),
        ("seed", 1.5, "an integer"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", float("inf"), "from -2 to 2"),
        ("n", 0, "from 1 to 128"),
        ("n", 1000, "from 1 to 128"),
        ("logprobs", 3, "true or false"),
        ("top_logprobs", 21, "from 0 to 20"),
        ("top_logprobs", 2, "needs logprobs"),
        ("parallel_tool_calls", "no", "true or false"),
        ("tool_choice", "always", "'auto', 'none', 'required'"),
        ("tool_choice", {"type": "function", "function": {"name": "sub"}}, r"among the tools \(add\)"),
        ("tool_choice", {"type": "allowed_tools"}, "'auto', 'none', 'required'"),
        ("response_format", {"type": "xml"}, "json_schema"),
        ("response_format", {"type": "json_schema"}, "json_schema"),
        ("response_format", "json", "json_schema"),
        ("logit_bias", {"5": 1}, "not a parameter of the model in training"),
    ],
)
async def test_an_unsupported_parameter_is_rejected_by_name(codec: ChatCodec, name: str, value: Any, says: str):
    recorder = Recorder(codec, max_calls=1)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        await recorder.tuner.chat(HI, tools=TOOLS, **{name: value})
    assert caught.value.name == name
    assert name in str(caught.value)
    assert recorder.tuner.calls == ()
    await recorder.tuner.chat(HI)  # the rejected request does not count as a call


def test_a_required_tool_needs_tools():
    with pytest.raises(InvalidRequestError, match="needs tools"):
        ChatOptions.parse({"tool_choice": "required"}, None)
    options = ChatOptions.parse({"tool_choice": {"type": "function", "function": {"name": "add"}}}, TOOLS)
    assert (options.tool_choice, options.tool_name) == ("required", "add")


async def test_the_run_replaces_the_parameters_of_requests_if_configured(codec: ChatCodec):
    recorder = Recorder(codec, temperature=0.9, client_sampling="override", fixed_sampling=("temperature",))
    for _ in range(2):
        await recorder.tuner.chat(HI, temperature=0.0, top_k=4, seed=3, presence_penalty=1.0, stop="x", max_tokens=9)
    await recorder.tuner.chat(HI, temperature=0.9)
    for params in recorder.requests[:2]:
        assert (params.temperature, params.top_k, params.presence_penalty) == (0.9, -1, 0.0)
        assert (params.stop, params.max_tokens) == (("x",), 9)
    assert recorder.requests[0].seed != recorder.requests[1].seed
    replaced = dict(recorder.tuner.replaced_parameters)
    assert replaced == {"temperature": 2, "top_k": 2, "presence_penalty": 2, "seed": 2}


async def test_a_trained_call_cannot_differ_in_a_parameter_that_the_trainer_fixes(codec: ChatCodec):
    recorder = Recorder(codec, temperature=0.9, fixed_sampling=("temperature",))
    with pytest.raises(UnsupportedParameterError, match=r"temperature=0\.2.*0\.9.*client_sampling: override") as caught:
        await recorder.tuner.chat(HI, temperature=0.2)
    assert caught.value.name == "temperature"
    await recorder.tuner.chat(HI, temperature=0.9, top_k=3)
    assert recorder.requests[0].top_k == 3


async def test_n_answers_are_calls_of_one_prompt(codec: ChatCodec):
    recorder = Recorder(codec, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"], max_calls=4)
    answer = await recorder.tuner.chat(HI, n=3, seed=5)
    assert [part.parsed.content for part in (answer, *answer.alternatives)] == ["a", "b", "c"]
    calls = recorder.tuner.calls
    assert calls == (answer.call, *(part.call for part in answer.alternatives))
    assert len({call.call_id for call in calls}) == 3
    assert len({call.prompt_ids for call in calls}) == 1
    assert [call.fork for call in calls] == [None] * 3
    assert recorder.requests[0].seed == 5
    assert len({params.seed for params in recorder.requests}) == 3
    second = await recorder.tuner.chat([*HI, calls[1].messages[-1], {"role": "user", "content": "go on"}])
    earlier = calls[1].prompt_ids + calls[1].completion_ids
    assert second.call.prompt_ids[: len(earlier)] == earlier
    with pytest.raises(CallLimitError):
        await recorder.tuner.chat(HI, n=2)


@pytest.mark.parametrize("stop", ["World", ["nothing", "World"], ["orl", "World"], "lo W"])
async def test_an_answer_ends_before_its_stop_string(codec: ChatCodec, stop: Any):
    recorder = Recorder(codec, ["Hello World, and more<|im_end|>", "ok<|im_end|>"])
    answer = await recorder.tuner.chat(HI, stop=stop)
    text = "Hello World, and more"
    # Of several strings, the one that is complete first.
    strings = [string for string in ([stop] if isinstance(stop, str) else stop) if string in text]
    found = min(((text.index(string), string) for string in strings), key=lambda place: place[0] + len(place[1]))
    assert answer.parsed.content.strip() == text[: found[0]].strip()
    assert answer.stop_string == found[1]
    call = answer.call
    assert call.finish_reason == "stop"
    whole = codec.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    assert list(call.completion_ids) == whole[: len(call.completion_ids)]
    assert found[1] in codec.decode(call.completion_ids)
    assert found[1] not in codec.decode(call.completion_ids[:-1])
    assert len(call.logprobs) == len(call.completion_ids)
    # The next request extends the sampled tokens; the end of turn, which was not sampled, is context.
    second = await recorder.tuner.chat([*HI, call.messages[-1], {"role": "user", "content": "go on"}])
    assert second.call.fork is None
    earlier = call.prompt_ids + call.completion_ids
    assert second.call.prompt_ids[: len(earlier)] == earlier
    assert codec.decode(second.call.prompt_ids[len(earlier) :]).startswith("<|im_end|>\n<|im_start|>user")
    samples = build_samples(recorder.tuner.calls)
    assert certificate(recorder.tuner.calls, samples) == 1.0
    trained = sum(sum(sample.train_counts) for sample in samples)
    assert trained == len(call.completion_ids) + len(second.call.completion_ids)


async def test_a_stop_string_at_the_token_limit_counts_as_stop(codec: ChatCodec):
    ids = codec.tokenizer.encode("one two three", add_special_tokens=False)
    count = next(count for count in range(len(ids)) if "two" in codec.decode(ids[:count]))
    recorder = Recorder(codec, ["one two three"] * 2, max_tokens=count)
    answer = await recorder.tuner.chat(HI, stop="two")
    assert (answer.call.finish_reason, len(answer.call.completion_ids)) == ("stop", count)
    cut = await recorder.tuner.chat(HI, stop="three")
    assert (cut.call.finish_reason, cut.stop_string, cut.parsed.content.strip()) == ("length", None, "one two")


async def test_a_stop_string_of_several_bytes_and_tokens(codec: ChatCodec):
    text = "dîner 🍰 à la carte"
    recorder = Recorder(codec, [text], max_tokens=100)
    answer = await recorder.tuner.chat(HI, stop=["🍰 à"])
    assert answer.parsed.content.strip() == "dîner"
    assert answer.stop_string == "🍰 à"


async def test_logprobs_are_those_of_the_record(codec: ChatCodec):
    recorder = Recorder(codec, ["a b<|im_end|>"])
    answer = await recorder.tuner.chat(HI, logprobs=True)
    assert len(answer.call.logprobs) == len(answer.call.completion_ids)


async def test_text_tokens_end_before_the_stop_string_or_the_end_token(codec: ChatCodec):
    recorder = Recorder(codec, ["a b stop<|im_end|>", "a b c<|im_end|>", "a b c d"], max_tokens=100)
    stopped = await recorder.tuner.chat(HI, stop="stop")
    assert codec.decode(stopped.call.completion_ids[: stopped.text_tokens]).rstrip() == "a b"
    ended = await recorder.tuner.chat(HI, stop="stop")
    assert codec.decode(ended.call.completion_ids[: ended.text_tokens]) == "a b c"
    cut = await recorder.tuner.chat(HI)
    assert cut.text_tokens == len(cut.call.completion_ids)
