"""An episode as the page draws it: messages, calls, the trie in segments, and what each token was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.run_record import RecordedEpisode, read_recorded_episode
from astuner.schema import Episode, LlmCall
from astuner.viewer.advantages import advantages_of_calls, by_agent
from astuner.viewer.marks import sampled_runs, template_runs, trained_runs
from astuner.viewer.token_texts import TokenTexts
from astuner.viewer.trie import Trie


def read_episode_at(folder: Path, path: str) -> RecordedEpisode:
    """Read an episode of the run in `folder`, given the path that the record's index has.

    Raises:
        RecordError: it cannot be read, or lies outside the run's folder.
    """
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise RecordError("the index names a file outside of the run's folder, which is not opened")
    return read_recorded_episode(file)


def episode_view(recorded: RecordedEpisode, texts: TokenTexts | None) -> dict[str, Any]:
    """Return all that the episode's page shows; see `_segments` for the tokens."""
    episode, labels = recorded.episode, recorded.labels
    trie = Trie(episode.calls)
    vocabulary = texts.of(number for segment in trie.segments for number in segment.ids) if texts else {}
    messages, uses = _messages(episode.calls)
    advantages = advantages_of_calls(recorded)
    return {
        "episode": _facts(episode),
        "step": labels.step,
        "split": labels.split,
        "advantage": labels.advantage,
        "has_updates": bool(recorded.updates),
        "agents": [
            {**agent, "reward": episode.agent_rewards.get(agent["agent"])}
            for agent in by_agent(episode.calls, advantages)
        ],
        "tokens": {
            "raw": sum(len(call.prompt_ids) + len(call.completion_ids) for call in episode.calls),
            "distinct": sum(len(segment.ids) for segment in trie.segments),
            "trained": sum(sum(sample.loss_mask) for sample in episode.samples),
        },
        "withheld": recorded.withheld,
        "has_texts": texts is not None,
        "vocabulary": {str(number): text for number, text in vocabulary.items()},
        "special": sorted(texts.special & vocabulary.keys()) if texts else [],
        "messages": messages,
        "calls": [
            {**_call(call, uses[number], trie.path(number)), "advantage": advantages.get(call.call_id)}
            for number, call in enumerate(episode.calls)
        ],
        "samples": [
            {
                "tokens": len(sample.token_ids), "trained": sum(sample.loss_mask), "weight": sample.weight,
                "calls": [span.call_id for span in sample.spans], "is_tree": sample.parents is not None,
            }
            for sample in episode.samples
        ],
        "segments": _segments(trie, recorded, vocabulary),
        "timelines": [_timeline(trie, leaf, episode.calls, advantages) for leaf in trie.leaves()],
    }  # fmt: skip


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
        "metadata": episode.metadata,
        "log_metrics": episode.log_metrics,
        "seconds": episode.end_time - episode.start_time,
    }


def _segments(trie: Trie, recorded: RecordedEpisode, vocabulary: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the trie: each distinct token once, so that the answer grows with them and not with the raw ones."""
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
    passed = set(path)
    on_it = [number for number in range(len(calls)) if trie.end(number) in passed]
    return {
        "segments": path,
        "calls": on_it,
        "tokens": trie.segments[leaf].start + len(trie.segments[leaf].ids),
        "agents": by_agent((calls[number] for number in on_it), advantages),
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


def _messages(calls: Sequence[LlmCall]) -> tuple[list[Any], list[list[int]]]:
    """Return every message once, and for each call which it has: calls repeat the conversation so far."""
    numbers: dict[int, int] = {}
    messages: list[Any] = []
    uses = []
    for call in calls:
        used = []
        for message in call.messages:
            # The reader of a record gives calls that share a message the same object.
            if id(message) not in numbers:
                numbers[id(message)] = len(messages)
                messages.append(message)
            used.append(numbers[id(message)])
        uses.append(used)
    return messages, uses
