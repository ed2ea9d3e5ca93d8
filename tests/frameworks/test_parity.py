"""The same episode through every face gives the same training data."""

from __future__ import annotations

from typing import Any

import pytest

from astuner.context_tracker import certificate
from tests.frameworks import agents
from tests.frameworks.episode import Agent, run_episode, training_data

AGENTS = [
    agents.openai_sdk,
    agents.openai_sdk_sync,
    agents.openai_sdk_streamed,
    agents.agentscope,
    agents.agentscope_tuner,
]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_a_face_gives_the_training_data_of_chat(agent: Agent, tokenizer: Any):
    expected, episode = run_episode(agents.chat, tokenizer), run_episode(agent, tokenizer)
    assert training_data(episode) == training_data(expected)
    assert certificate(episode.calls, episode.samples) == 1.0


def test_the_scripted_episode_has_every_kind_of_turn(tokenizer: Any):
    episode = run_episode(agents.chat, tokenizer)
    first, second, third, fourth = episode.calls
    assert [len(call.messages[-1].get("tool_calls", ())) for call in episode.calls] == [1, 2, 0, 0]
    assert [call.finish_reason for call in episode.calls] == ["stop", "stop", "stop", "length"]
    assert [message["role"] for message in fourth.messages[:2]] == ["system", "user"]
    assert [message["content"] for message in fourth.messages if message["role"] == "tool"] == ["3", "7", "11"]
    (sample,) = episode.samples
    assert sum(sample.train_counts) == sum(len(call.completion_ids) for call in (first, second, third, fourth))
