"""The same episode gives the same training data through every interface of the model.

To test another interface, add an entry to `INTERINTERFACES`: an agent of `agents.py`, with the marker of its framework.
"""

from __future__ import annotations

from typing import Any

import pytest

from astuner.context_tracker.audit import certificate
from tests.frameworks import agents
from tests.frameworks.episode import Agent, add, run_episode, training_data

# Warnings of the frameworks: names that they will move, and connections that they leave to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")

MARK = pytest.mark
INTERFACES = [
    (agents.openai_sdk, ()),
    (agents.openai_sdk_sync, ()),
    (agents.openai_sdk_streamed, ()),
    (agents.openai_responses, ()),
    (agents.openai_gateway, ()),
    (agents.openai_gateway_streamed, ()),
    (agents.agentscope, ()),
    (agents.agentscope_tuner, ()),
    (agents.langgraph, MARK.langgraph),
    (agents.autogen, MARK.autogen),
    (agents.openai_agents, MARK.openai_agents),
    (agents.openai_agents_responses, MARK.openai_agents),
    (agents.openai_agents_gateway, MARK.openai_agents),
    (agents.pydantic_ai, MARK.pydantic_ai),
    (agents.agentscope2, MARK.agentscope2),
    (agents.agentscope2_streamed, MARK.agentscope2),
]


@pytest.mark.parametrize("agent", [pytest.param(agent, marks=marks, id=agent.__name__) for agent, marks in INTERFACES])
def test_every_interface_gives_the_training_data_of_chat(agent: Agent, tokenizer: Any):
    expected, episode = run_episode(agents.chat, tokenizer), run_episode(agent, tokenizer)
    assert training_data(episode) == training_data(expected)
    assert certificate(episode.calls, episode.samples) == 1.0


def test_the_scripted_episode_has_every_kind_of_turn(tokenizer: Any):
    episode = run_episode(agents.chat, tokenizer)
    assert [len(call.messages[-1].get("tool_calls", ())) for call in episode.calls] == [1, 2, 0, 0]
    assert [call.finish_reason for call in episode.calls] == ["stop", "stop", "stop", "length"]
    last = episode.calls[-1].messages
    assert [message["role"] for message in last[:2]] == ["system", "user"]
    assert [message["content"] for message in last if message["role"] == "tool"] == ["3", "7", "11"]
    (sample,) = episode.samples
    assert sum(sample.train_counts) == sum(len(call.completion_ids) for call in episode.calls)


@pytest.mark.google_adk
def test_google_adk(tokenizer: Any):
    """ADK words the tool and its results in its own way, so the prompts differ from those of `chat`."""
    expected, episode = run_episode(agents.chat, tokenizer), run_episode(agents.google_adk, tokenizer)
    calls = [(call.completion_ids, call.finish_reason, call.trained, call.fork) for call in episode.calls]
    assert calls == [(call.completion_ids, call.finish_reason, call.trained, None) for call in expected.calls]
    (sample,) = episode.samples
    trained = [token for token, count in zip(sample.token_ids, sample.train_counts, strict=True) if count]
    assert trained == [token for call in expected.calls for token in call.completion_ids]
    assert certificate(episode.calls, episode.samples) == 1.0
    assert [message["content"] for message in episode.calls[-1].messages if message["role"] == "tool"] == [
        f'{{"result": "{add(a, b)}"}}' for a, b in ((1, 2), (3, 4), (5, 6))
    ]


@pytest.mark.smolagents
def test_smolagents(tokenizer: Any):
    """Its agents write code in place of tool calls, and their answers end at stop strings."""
    answers = (
        "Thought: I add.\n<code>\nprint(add(1, 2))\n</code> and more",
        "Thought: Done.\n<code>\nfinal_answer(add(3, 4))\n</code>",
    )
    episode = run_episode(agents.smolagents, tokenizer, answers)
    assert episode.status == "ok", episode.error
    first, second = episode.calls
    assert first.sampling.stop[-1] == "</code>"
    assert (first.fork, second.fork) == (None, None)
    assert "Execution logs:\n3\n" in str(second.messages[-2]["content"])
    assert certificate(episode.calls, episode.samples) == 1.0
    assert sum(sum(sample.train_counts) for sample in episode.samples) == sum(
        len(call.completion_ids) for call in episode.calls
    )
