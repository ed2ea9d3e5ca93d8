"""JSON content of an episode's page: verdict, messages, calls, the token trie, advantages and transcripts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astuner.run_record.episode_file import RecordedEpisode, read_recorded_episode
from astuner.run_record.episodes import NO_ADVANTAGE, last_text, without_blocks
from astuner.run_record.recorded_run import file_in_run
from astuner.run_record.updates import call_advantages
from astuner.schema import Episode, LlmCall
from astuner.viewer.token_texts import TokenTexts
from astuner.viewer.trie import Trie, sampled_runs, template_runs, trained_runs

_MAX_TRANSCRIPT_TEXT = 1500
_MAX_TRANSCRIPT_MESSAGES = 60
_PARAMS = "astuner.task_judge.params."
# Fields of a task's metadata that hold the expected answer, besides those that the judge's parameters name.
_EXPECTED = ("answer", "target", "solution", "ground_truth", "reference")


class Messages:
    """The distinct messages of calls, which repeat the conversation so far.

    Attributes:
        distinct: The messages in the order in which the calls first contain them.
        of_call: Indices in `distinct` of each call's messages.
        authors: For each message in `distinct`, the index of the call that generated it; None for other messages.
        agents: For each message in `distinct`, this call's agent; empty for other messages.
    """

    def __init__(self, calls: Sequence[LlmCall]) -> None:
        numbers: dict[int, int] = {}
        written: dict[str, int] = {}
        self.distinct: list[object] = []
        self.of_call: list[list[int]] = []
        self.authors: list[int | None] = []
        for number, call in enumerate(calls):
            indices = []
            for place, message in enumerate(call.messages):
                # The reader of a record returns one object for a message that calls share.
                if id(message) not in numbers:
                    numbers[id(message)] = len(self.distinct)
                    self.distinct.append(message)
                    self.authors.append(_author(message, number, place == len(call.messages) - 1, written))
                indices.append(numbers[id(message)])
            self.of_call.append(indices)
        self.agents = ["" if author is None else calls[author].agent_name for author in self.authors]


def conversation(calls: Sequence[LlmCall]) -> list[tuple[object, str]]:
    """Return the calls' messages without the repetitions in later calls, each with its author.

    The author is the name of the agent whose call generated the message; empty for other messages.
    """
    messages = Messages(calls)
    keys = [repr(message) for message in messages.distinct]
    seen: Counter[str] = Counter()
    emitted = []
    for indices in messages.of_call:
        in_call: Counter[str] = Counter()
        for index in indices:
            key = keys[index]
            in_call[key] += 1
            if in_call[key] > seen[key]:
                seen[key] += 1
                emitted.append((messages.distinct[index], messages.agents[index]))
    return emitted


def _author(message: object, call: int, is_last: bool, written: dict[str, int]) -> int | None:
    """Return the index of the call that generated a message in `call`; `written` has the answers so far."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return None
    # A call's last message is its answer. An agent may send a copy of the answer with its next call.
    key = repr(message)
    return written.setdefault(key, call) if is_last else written.get(key)


def read_episode_at(folder: Path, path: str) -> RecordedEpisode:
    """Read the episode of the run in `folder` with this `path` in the record's index.

    Raises:
        RecordError: If the file cannot be read or is outside the run's folder.
    """
    return read_recorded_episode(file_in_run(folder, path))


def episode_view(recorded: RecordedEpisode, texts: TokenTexts | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an episode's page.

    `texts` is None if the tokenizer is not available. `config` has the run's configuration as dotted keys and values.
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
    """Return the facts about an episode without its messages and tokens; `config` as in `episode_view`."""
    labels = recorded.labels
    return {
        "episode": {
            "episode_id": recorded.episode.episode_id,
            "task_id": recorded.episode.task.task_id,
            "main_query": recorded.episode.task.main_query,
            "task_metadata": recorded.episode.task.metadata,
            "repeat_index": recorded.episode.repeat_index,
            "status": recorded.episode.status,
            "reward": recorded.episode.reward,
            "is_success": recorded.episode.is_success,
            "dropped_samples": recorded.episode.dropped_samples,
            "error_kind": recorded.episode.error_kind,
            "error": recorded.episode.error,
            "error_traceback": recorded.episode.error_traceback,
            "process_effects": recorded.episode.process_effects,
            "ended_processes": recorded.episode.ended_processes,
            "anomaly": None
            if recorded.episode.anomaly is None
            else {"call": recorded.episode.anomaly.call, "text": str(recorded.episode.anomaly)},
            "metadata": recorded.episode.metadata,
            "log_metrics": recorded.episode.log_metrics,
            "judgement": None if recorded.episode.judgement is None else asdict(recorded.episode.judgement),
            "seconds": recorded.episode.end_time - recorded.episode.start_time,
        },
        "verdict": verdict_view(recorded.episode, config),
        "step": labels.step,
        "split": labels.split,
        "advantage": labels.advantage,
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
        "fork": fork and {name: value for name, value in asdict(fork).items() if not name.endswith("_ids")},
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


def verdict_view(episode: Episode, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected answer, the agent's answer, and the judge with its parameters; `config` as in `episode_view`.

    Returns:
        `expected`, fields of the task's metadata; `answer` and `answer_source`, the field of the workflow's metadata
        that holds it or `last message`; `judge`, the class or the type of the judge; and `judge_params`.
    """
    params = {key.removeprefix(_PARAMS): value for key, value in config.items() if key.startswith(_PARAMS)}
    named = [value for key, value in params.items() if key.endswith("_field") and key != "answer_field"]
    metadata = episode.task.metadata
    fields = [
        name
        for name in dict.fromkeys([*named, *_EXPECTED])
        if isinstance(name, str) and metadata.get(name) not in (None, "")
    ]
    answer_field = params.get("answer_field", "final_answer")
    answer = episode.metadata.get(answer_field) if isinstance(answer_field, str) else None
    has_answer = answer not in (None, "")
    if isinstance(answer, str):
        answer = without_blocks(answer)
    kind = config.get("astuner.task_judge.judge_type")
    return {
        "expected": {name: metadata[name] for name in fields},
        "answer": answer if has_answer else last_text(episode),
        "answer_source": answer_field if has_answer else "last message",
        "judge": kind if kind == "rubrics_auto_grader" else config.get("astuner.task_judge.judge_protocol"),
        "judge_params": params,
    }
