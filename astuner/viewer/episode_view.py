"""JSON content of an episode's page: messages, calls, the trie of tokens, advantages and transcripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astuner.run_record.episode_file import RecordedEpisode, read_recorded_episode
from astuner.run_record.episodes import NO_ADVANTAGE
from astuner.run_record.updates import call_advantages
from astuner.schema import Episode, LlmCall
from astuner.viewer.conversation import Messages
from astuner.viewer.run_files import file_in_run
from astuner.viewer.token_kinds import sampled_runs, template_runs, trained_runs
from astuner.viewer.token_texts import TokenTexts
from astuner.viewer.trie import Trie
from astuner.viewer.verdict import verdict_view

_MAX_TRANSCRIPT_TEXT = 1500
_MAX_TRANSCRIPT_MESSAGES = 60


def read_episode_at(folder: Path, path: str) -> RecordedEpisode:
    """Read an episode of the run in `folder`.

    Args:
        folder: The run's folder.
        path: The episode's path in the record's index.

    Raises:
        RecordError: If the file cannot be read or is outside the run's folder.
    """
    return read_recorded_episode(file_in_run(folder, path))


def episode_view(recorded: RecordedEpisode, texts: TokenTexts | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an episode's page.

    Args:
        recorded: The episode.
        texts: Converts token ids to texts; None if the tokenizer is not available.
        config: The run's configuration as dotted keys and values.
    """
    episode, labels = recorded.episode, recorded.labels
    trie = Trie(episode.calls)
    vocabulary = texts.of(number for segment in trie.segments for number in segment.ids) if texts else {}
    messages = Messages(episode.calls)
    advantages = advantages_of_calls(recorded)
    lacks_advantage = labels.split == "train" and episode.status == "ok" and labels.advantage is None
    return {
        **episode_summary(recorded, config),
        "has_updates": bool(recorded.updates),
        "note": NO_ADVANTAGE if lacks_advantage else None,
        "agents": [
            {**agent, "reward": episode.agent_rewards.get(agent["agent"])}
            for agent in by_agent(episode.calls, advantages)
        ],
        "tokens": {
            "raw": sum(len(call.prompt_ids) + len(call.completion_ids) for call in episode.calls),
            "distinct": sum(len(segment.ids) for segment in trie.segments),
            "trained": sum(sum(sample.train_counts) for sample in episode.samples),
        },
        "withheld": recorded.withheld,
        "has_texts": texts is not None,
        "vocabulary": {str(number): text for number, text in vocabulary.items()},
        "special": sorted(texts.special & vocabulary.keys()) if texts else [],
        "messages": messages.distinct,
        "authors": messages.authors,
        "calls": [
            {**_call(call, messages.of_call[number], trie.path(number)), "advantage": advantages.get(call.call_id)}
            for number, call in enumerate(episode.calls)
        ],
        "samples": [
            {
                "tokens": len(sample.token_ids), "trained": sum(sample.train_counts), "weight": sample.weight,
                "calls": [span.call_id for span in sample.spans], "is_tree": sample.parents is not None,
            }
            for sample in episode.samples
        ],
        "segments": _segments(trie, recorded, vocabulary),
        "timelines": [_timeline(trie, leaf, episode.calls, advantages) for leaf in trie.leaves()],
    }  # fmt: skip


def episode_summary(recorded: RecordedEpisode, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about an episode without its messages and tokens.

    Args:
        recorded: The episode.
        config: The run's configuration as dotted keys and values.
    """
    labels = recorded.labels
    return {
        "episode": _facts(recorded.episode),
        "verdict": verdict_view(recorded.episode, config),
        "step": labels.step,
        "split": labels.split,
        "advantage": labels.advantage,
    }


def _facts(episode: Episode) -> dict[str, Any]:
    return {
        "episode_id": episode.episode_id,
        "task_id": episode.task.task_id,
        "main_query": episode.task.main_query,
        "task_metadata": episode.task.metadata,
        "repeat_index": episode.repeat_index,
        "status": episode.status,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "dropped_samples": episode.dropped_samples,
        "error_kind": episode.error_kind,
        "error": episode.error,
        "error_traceback": episode.error_traceback,
        "process_effects": episode.process_effects,
        "ended_processes": episode.ended_processes,
        "anomaly": None if episode.anomaly is None else {"call": episode.anomaly.call, "text": str(episode.anomaly)},
        "metadata": episode.metadata,
        "log_metrics": episode.log_metrics,
        "judgement": None if episode.judgement is None else asdict(episode.judgement),
        "seconds": episode.end_time - episode.start_time,
    }


def _segments(trie: Trie, recorded: RecordedEpisode, vocabulary: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the trie. Each distinct token occurs once, so the size does not grow with repeated prompts."""
    episode = recorded.episode
    sampled = sampled_runs(trie, episode.calls)
    trained = trained_runs(trie, episode.calls, episode.samples, recorded.updates)
    template = template_runs(trie, episode.calls, vocabulary) if vocabulary else {}
    return [
        {
            "parent": segment.parent, "start": segment.start, "ids": segment.ids,
            "sampled": sampled.get(number, []), "trained": trained.get(number, []),
            "template": template.get(number, []),
        }
        for number, segment in enumerate(trie.segments)
    ]  # fmt: skip


def _timeline(trie: Trie, leaf: int, calls: Sequence[LlmCall], advantages: Mapping[str, float]) -> dict[str, Any]:
    path = trie.path_to(leaf)
    segments = set(path)
    on_path = [number for number in range(len(calls)) if trie.end(number) in segments]
    return {
        "segments": path,
        "calls": on_path,
        "tokens": trie.segments[leaf].start + len(trie.segments[leaf].ids),
        "agents": by_agent((calls[number] for number in on_path), advantages),
    }


def _call(call: LlmCall, messages: Sequence[int], path: Sequence[int]) -> dict[str, Any]:
    fork = call.fork
    return {
        "call_id": call.call_id,
        "agent": call.agent_name,
        "tag": call.target_tag,
        "prompt": len(call.prompt_ids),
        "completion": len(call.completion_ids),
        "finish_reason": call.finish_reason,
        "policy_version": call.policy_version,
        "trained": call.trained,
        "reward": call.reward,
        "temperature": call.sampling.temperature,
        "seconds": call.end_time - call.start_time,
        "messages": messages,
        "path": path,
        "fork": None
        if fork is None
        else {
            "cause": fork.cause,
            "call_id": fork.call_id,
            "position": fork.position,
            "expected": fork.expected,
            "found": fork.found,
            "message_index": fork.message_index,
        },
    }


def advantages_of_calls(recorded: RecordedEpisode) -> dict[str, float]:
    """Return the advantage of each trained call by id: its own, or the episode's if the record has no others."""
    if recorded.updates:
        return call_advantages(recorded.episode.samples, recorded.updates)
    advantage = recorded.labels.advantage
    if advantage is None:
        return {}
    return {span.call_id: advantage for sample in recorded.episode.samples for span in sample.spans}


def by_agent(calls: Iterable[LlmCall], advantages: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the call count and the range of advantages for each agent.

    The range is None for an agent without trained calls.
    """
    advantages_by_agent: dict[str, list[float | None]] = {}
    for call in calls:
        advantages_by_agent.setdefault(call.agent_name, []).append(advantages.get(call.call_id))
    rows = []
    for agent, values in sorted(advantages_by_agent.items()):
        trained = [value for value in values if value is not None]
        least, most = min(trained, default=None), max(trained, default=None)
        rows.append({"agent": agent, "calls": len(values), "least": least, "most": most})
    return rows


def transcript(episode: Episode) -> list[dict[str, Any]]:
    """Return the longest conversation's messages in the chat API's format, with long texts cut.

    `agent` is the agent that wrote a message, or an empty text.
    """
    if not episode.calls:
        return []
    longest = max(range(len(episode.calls)), key=lambda n: (len(episode.calls[n].messages), episode.calls[n].end_time))
    messages = Messages(episode.calls)
    indices = messages.of_call[longest]
    if len(indices) > _MAX_TRANSCRIPT_MESSAGES:
        half = _MAX_TRANSCRIPT_MESSAGES // 2
        indices = [*indices[:half], *indices[-half:]]
    return [_shorten_message(messages.distinct[index], messages.agents[index]) for index in indices]


def _shorten_message(message: object, agent: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "?", "content": _shorten(str(message)), "agent": ""}
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": str(message.get("role", "?"))[:40],
        "name": str(message.get("name") or "")[:60],
        "agent": agent[:60],
        "content": _shorten(content) if content else "",
        "tool_calls": [_shorten_tool_call(call) for call in calls[:20]] if isinstance(calls, list) else [],
    }


def _shorten_tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {"function": {"arguments": _shorten(call)}}
    return {"function": {"name": str(function.get("name"))[:60], "arguments": _shorten(function.get("arguments"))}}


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    length = len(text)
    return text if length <= _MAX_TRANSCRIPT_TEXT else f"{text[:_MAX_TRANSCRIPT_TEXT]}… ({length:,} characters)"
