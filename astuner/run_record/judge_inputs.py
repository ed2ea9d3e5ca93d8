"""A judge's inputs, read from the files of recorded episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from astuner.errors import RecordError, short_repr
from astuner.run_record.episode_file import unfold_calls
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.jsonable import decode
from astuner.schema import LlmCall, Task, WorkflowOutput, WorkflowTask


class RecordedOutput(WorkflowOutput):
    """The output of a recorded workflow. Its calls are decoded when they are first read, as most judges do not."""

    __slots__ = ("_calls",)
    _calls: tuple[LlmCall, ...] | Callable[[], tuple[LlmCall, ...]]

    @property
    def calls(self) -> tuple[LlmCall, ...]:
        """The episode's LLM calls, in order of completion."""
        calls = self._calls
        if not isinstance(calls, tuple):
            self._calls = calls = calls()
        return calls

    @calls.setter
    def calls(self, calls: tuple[LlmCall, ...] | Callable[[], tuple[LlmCall, ...]]) -> None:
        self._calls = calls


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A recorded episode, as its judge saw it.

    Attributes:
        entry: The episode's line in the index.
        task: The task and the identity of the episode; the environment and the seed are not recorded.
        output: The output of the workflow.
        agent_rewards: The recorded rewards of the agents.
        call_rows: The recorded id, agent, reward and training of each call, in order.
        has_anomaly: Whether degenerate output gave the episode its reward.
    """

    entry: EpisodeEntry
    task: WorkflowTask
    output: RecordedOutput
    agent_rewards: Mapping[str, float]
    call_rows: Sequence[LlmCall]
    has_anomaly: bool


def read_judge_inputs(folder: Path, entries: Iterable[EpisodeEntry]) -> Iterator[JudgeInput]:
    """Yield a judge's inputs for a run's episodes, one after the other to limit the memory.

    Token ids, messages and samples are not decoded, so that this is about ten times as fast as `read_episode`.

    Raises:
        RecordError: If an episode's file cannot be read.
    """
    for entry in entries:
        path = folder / entry.path
        try:
            yield _judge_input(entry, _parse(path.read_bytes())["episode"])
        except OSError as error:
            raise RecordError(f"cannot read the episode {path}: {error.strerror or error}") from error
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise RecordError(f"{path} contains no complete episode: {short_repr(error)}") from error


def _parse(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:  # for example a lone surrogate, which the standard library accepts
        document = json.loads(data)
    if not isinstance(document, dict):
        raise TypeError("expected a JSON object")
    return document


def _judge_input(entry: EpisodeEntry, row: dict[str, Any]) -> JudgeInput:
    rows = row["calls"]

    def decode_calls() -> tuple[LlmCall, ...]:
        unfold_calls(rows)
        return tuple(decode(LlmCall, call) for call in rows)

    output = RecordedOutput(metadata=row.get("metadata") or {}, log_metrics=row.get("log_metrics") or {})
    output.calls = decode_calls
    task = WorkflowTask(
        decode(Task, row["task"]), entry.episode_id, entry.repeat_index, is_validation=entry.split == "val"
    )
    agent_rewards = row.get("agent_rewards") or {}
    return JudgeInput(entry, task, output, agent_rewards, [_outline(call) for call in rows], bool(row.get("anomaly")))


def _outline(row: Mapping[str, Any]) -> LlmCall:
    return LlmCall(
        row["call_id"], "", (), (), (), "stop",
        agent_name=row.get("agent_name") or "", trained=bool(row.get("trained", True)), reward=row.get("reward"),
    )  # fmt: skip
