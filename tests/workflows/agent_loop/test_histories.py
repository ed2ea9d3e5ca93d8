"""History managers: what the model sees, and exact samples whatever it sees."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import uvicorn
from fastapi import FastAPI

from astuner.config.workflow import SUMMARY_TARGET, ContextTrackerConfig
from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.schema import Episode
from astuner.workflows.agent_loop.workflow import LoopSettings
from tests.examples import examples
from tests.workflows.agent_loop.conftest import Corridor, CorridorWithTools, HighCard, Play

TYPES = ("linear", "sliding_window", "linear_think", "auto_context")


def managed(kind: str, **values: Any) -> LoopSettings:
    return LoopSettings("text", ContextTrackerConfig.model_validate({"context_tracker_type": kind, **values}))


def contents(episode: Episode, call: int) -> list[str]:
    return [str(message["content"]) for message in episode.calls[call].messages[:-1]]


def causes(episode: Episode) -> list[str | None]:
    return [call.fork.cause if call.fork else None for call in episode.calls]


def is_exact(episode: Episode) -> bool:
    trained = [call for call in episode.calls if call.trained]
    trees = build_samples(episode.calls, merge="tree")
    return certificate(trained, episode.samples) == certificate(trained, trees) == 1.0


def test_a_window_has_the_last_turns_and_the_instruction(play: Play) -> None:
    episode = play(Corridor(), ["right"] * 4, settings=managed("sliding_window", sliding_window_cm={"turns": 1}))
    assert contents(episode, 1) == ["You walk.", "Walk to the goal.\n\nYou are at 0.", "right", "You are at 1."]
    assert contents(episode, 2) == ["You walk.", "Walk to the goal.\n\nYou are at 1.", "right", "You are at 2."]
    assert contents(episode, 3) == ["You walk.", "Walk to the goal.\n\nYou are at 2.", "right", "You are at 3."]
    assert causes(episode) == [None, None, "window_moved", "window_moved"]
    forks = [call.fork for call in episode.calls if call.fork]
    assert [(fork.call_id, fork.message_index) for fork in forks] == [("episode/1", 1), ("episode/2", 1)]
    assert is_exact(episode)
    alone = play(Corridor(), ["right"] * 4, settings=managed("sliding_window", sliding_window_cm={"turns": 0}))
    assert contents(alone, 3) == ["You walk.", "Walk to the goal.\n\nYou are at 3."]


def test_a_window_may_begin_after_a_tool_call(play: Play) -> None:
    call = '<tool_call>\n{"name": "go", "arguments": {"to": "right"}}\n</tool_call>'
    settings = LoopSettings("tool_call", managed("sliding_window", sliding_window_cm={"turns": 1}).history)
    episode = play(CorridorWithTools(), [call] * 4, settings=settings)
    assert [message["role"] for message in episode.calls[-1].messages] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert contents(episode, -1)[1::2] == ["Walk to the goal.\n\nYou are at 2.", "You are at 3."]
    assert is_exact(episode)


def thoughts(episode: Episode, call: int) -> list[str]:
    answers = [message for message in episode.calls[call].messages[:-1] if message["role"] == "assistant"]
    return [str(message.get("reasoning_content", "")).strip() for message in answers]


def test_earlier_thinking_is_dropped(play: Play) -> None:
    answers = [f"<think>\nthought {index}\n</think>\n\nright" for index in range(4)]
    kept = play(Corridor(), answers, settings=managed("linear"))
    assert (causes(kept), thoughts(kept, 3)) == ([None] * 4, ["thought 0", "thought 1", "thought 2"])
    assert len(kept.samples) == 1
    dropped = play(Corridor(), answers, settings=managed("linear_think"))
    assert causes(dropped) == [None, *["thinking_dropped"] * 3]
    assert thoughts(dropped, 3) == ["", "", ""]
    assert contents(dropped, 3)[2::2] == ["right"] * 3
    assert is_exact(dropped)
    one = play(Corridor(), answers, settings=managed("linear_think", linear_think_cm={"keep_turns": 2}))
    assert (causes(one), thoughts(one, 3)) == ([None, None, None, "thinking_dropped"], ["", "thought 1", "thought 2"])
    assert is_exact(one)


def test_answers_without_thinking_are_extended(play: Play) -> None:
    answers = ["<think>\nhm\n</think>\n\nright", "right", "right", "right"]
    episode = play(Corridor(), answers, settings=managed("linear_think"))
    assert causes(episode) == [None, "thinking_dropped", None, None]
    assert is_exact(episode)


def prompt_tokens(episode: Episode) -> list[int]:
    return [len(call.prompt_ids) for call in episode.calls]


def test_a_long_history_is_summarised(play: Play) -> None:
    step, long = r"\boxed{right}", f"{'I think. ' * 50}" + r"\boxed{right}"
    whole = prompt_tokens(play(Corridor(), [step, long, step, step], settings=LoopSettings("box")))
    auto = {"auto_context_cm": {"prompt": "Summarize."}, "max_env_len": whole[2] - 1}
    history = managed("auto_context", **auto).history
    settings = LoopSettings("box", history, step_rewards="returns_to_go", gamma=0.5)
    episode = play(Corridor(), [step, long, "I walked to 2.", step, step], settings=settings)
    assert contents(episode, 2)[2:] == [step, "You are at 1.", long.strip(), "You are at 2.\n\nSummarize."]
    form = "Write your action as \\boxed{action}."
    instruction = f"Walk to the goal.\n\n{form}\n\nSummary of the steps so far:\nI walked to 2.\n\nYou are at 2."
    assert contents(episode, 3) == ["You walk.", instruction]
    assert contents(episode, 4) == ["You walk.", instruction, step, "You are at 3."]
    assert causes(episode) == [None, None, None, "history_compressed", None]
    assert episode.calls[3].fork is not None
    assert episode.calls[3].fork.call_id == "episode/2"
    assert is_exact(episode)
    assert all(call.trained for call in episode.calls)
    # The summary has the reward of the step after it.
    assert [call.reward for call in episode.calls] == [0.46875, 0.4375, 0.375, 0.375, 0.25]


def test_a_second_summary_replaces_the_first_and_last_turns_may_remain(play: Play) -> None:
    auto = {"auto_context_cm": {"prompt": "Summarize.", "keep_turns": 1}, "max_env_len": 1}
    answers = ["right", "right", "first", "right", "second", "right"]
    episode = play(Corridor(), answers, settings=managed("auto_context", **auto))
    assert episode.reward == 1.0
    assert contents(episode, 4)[1].startswith(
        "Walk to the goal.\n\nSummary of the steps so far:\nfirst\n\nYou are at 1."
    )
    last = contents(episode, 5)
    assert last[1:] == [
        "Walk to the goal.\n\nSummary of the steps so far:\nsecond\n\nYou are at 2.", "right", "You are at 3.",
    ]  # fmt: skip
    assert causes(episode) == [None, None, None, "history_compressed", None, "history_compressed"]
    assert is_exact(episode)


def test_a_summary_is_no_longer_than_configured_and_calls_no_tool(play: Play) -> None:
    call = '<tool_call>\n{"name": "go", "arguments": {"to": "right"}}\n</tool_call>'
    auto = {"max_env_len": 1, "alien_llm_response_length": 5}
    settings = LoopSettings("tool_call", managed("auto_context", **auto).history)
    corridor = CorridorWithTools()
    episode = play(corridor, [call, call, call], settings=settings, max_calls=3)
    assert [len(made.completion_ids) <= 5 for made in episode.calls] == [False, True, False]
    assert [message["role"] for message in episode.calls[1].messages[-3:]] == ["tool", "user", "assistant"]
    assert len(corridor.actions) == 2
    assert causes(episode) == [None, None, "history_compressed"]
    assert is_exact(episode)


def test_a_call_limit_within_a_summary_ends_the_episode(play: Play) -> None:
    episode = play(Corridor(), ["right", "summary"], settings=managed("auto_context", max_env_len=1), max_calls=2)
    assert (episode.status, episode.reward, episode.metadata["ended_by"]) == ("ok", 0.25, "max_steps")


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """An OpenAI-compatible server that answers "a summary", and the requests that it has received."""
    app, requests = FastAPI(), list[Mapping[str, Any]]()

    @app.post("/v1/chat/completions")
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        message = {"role": "assistant", "content": "a summary"}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", requests
    server.should_exit = True
    thread.join()


def test_another_model_may_write_the_summaries(play: Play, endpoint: tuple[str, list[Mapping[str, Any]]]) -> None:
    url, requests = endpoint
    auto = {"auto_context_cm": {"base_url": url, "prompt": "Summarize."}, "max_env_len": 1}
    targets = Targets(None, {SUMMARY_TARGET: FrozenModel("big", url, "key", SUMMARY_TARGET)})
    settings = managed("auto_context", alien_llm_response_length=9, **auto)
    episode = play(Corridor(), ["right"] * 4, settings=settings, targets=targets)
    assert episode.reward == 1.0
    assert [call.trained for call in episode.calls] == [True, False, True, False, True, False, True]
    assert causes(episode)[2::2] == ["history_compressed"] * 3
    assert contents(episode, 2)[1].endswith("Summary of the steps so far:\na summary\n\nYou are at 1.")
    assert (requests[0]["model"], requests[0]["max_tokens"]) == ("big", 9)
    (question,) = requests[0]["messages"]
    assert question["content"].startswith(
        "system: You walk.\n\nuser: Walk to the goal.\n\nYou are at 0.\n\nassistant: r"
    )
    assert question["content"].endswith("user: You are at 1.\n\nSummarize.")
    assert is_exact(episode)


def test_an_error_of_the_other_model_names_its_setting(play: Play) -> None:
    url = "http://127.0.0.1:9/v1"
    targets = Targets(None, {SUMMARY_TARGET: FrozenModel("big", url, "key", SUMMARY_TARGET)})
    settings = managed("auto_context", max_env_len=1, auto_context_cm={"base_url": url})
    episode = play(Corridor(), ["right"] * 4, settings=settings, targets=targets)
    assert episode.status == "failed"
    assert f"context_tracker.alien_llm_model (big at {url}) did not answer as an OpenAI" in str(episode.error)


def test_seats_have_histories_of_their_own(play: Play) -> None:
    episode = play(HighCard(), ["1"] * 6, settings=managed("sliding_window", sliding_window_cm={"turns": 0}))
    assert causes(episode) == [None] * 3 + ["window_moved"] * 3
    assert [call.fork.call_id for call in episode.calls if call.fork] == ["episode/0", "episode/1", "episode/2"]
    assert is_exact(episode)


@hypothesis.settings(max_examples=examples(25), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    kind=st.sampled_from(TYPES),
    answers=st.lists(
        st.sampled_from(["right", "left", "", "<think>\na\n</think>\n\nright", "<think>\nb", " right ", "b\n"]),
        min_size=1,
        max_size=7,
    ),
    kept=st.integers(0, 2),
    limit=st.integers(1, 150),
    renderer=st.sampled_from(["qwen3", "auto"]),
    environment=st.sampled_from([Corridor, HighCard]),
)
def test_samples_are_exact_whatever_is_kept(
    play: Play, kind: str, answers: Sequence[str], kept: int, limit: int, renderer: str, environment: Any
) -> None:
    spoken = [f"{index}" if environment is HighCard else answer for index, answer in enumerate(answers)]
    settings = managed(
        kind,
        max_env_len=limit,
        sliding_window_cm={"turns": kept},
        linear_think_cm={"keep_turns": kept},
        auto_context_cm={"keep_turns": kept},
    )
    episode = play(environment(), spoken, settings=settings, renderer=renderer, max_calls=len(spoken))
    assert episode.status == "ok", episode.error
    assert is_exact(episode)
    own = {"sliding_window": "window_moved", "linear_think": "thinking_dropped", "auto_context": "history_compressed"}
    # The script ends some answers within their thinking, and the template `auto` drops earlier thinking.
    others = {None, "truncated", "template_rewrote_history"}
    assert set(causes(episode)) <= {own.get(kind), *others}
