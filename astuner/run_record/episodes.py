"""The episodes of a run and their answers: one file per episode, and an index that is fast to list.

episodes/index.jsonl
episodes/pending.jsonl  # the lines of a step whose update runs
episodes/{train|val}/step_000012/{task id}-{repeat}-{hash of episode id}.json
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loguru import logger

from astuner.errors import RecordError, short_repr
from astuner.run_record.episode_file import EpisodeLabels, add_update, episode_to_json, read_recorded_episode
from astuner.run_record.files import (
    JsonLines,
    OnDamaged,
    dump_json,
    parsed_rows,
    read_json_lines,
    write_atomically,
    write_errors,
)
from astuner.run_record.jsonable import Redact, decode, encode, to_jsonable
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, EpisodeStatus, Split, TokenCounts
from astuner.system.redaction.redactor import current_redactor

_FOLDER = "episodes"
_INDEX = "index.jsonl"
_PENDING = "pending.jsonl"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
# Longest texts in a file name and in the index, in characters.
_MAX_TASK_NAME = 80
_MAX_ERROR = 500
_MAX_QUERY = 200
# Number of texts whose redaction is remembered: most texts of an episode, such as names, occur in others too.
_MAX_REDACTED = 1024

NO_ADVANTAGE = "without an advantage: the update of the step has not ended or has failed, or the run does not train"
"""Why training episodes with a reward have no advantage, to follow their number."""
# Longest answer in lists, in characters.
_MAX_BRIEF = 300
# Longest answer whose blocks are parsed, in characters.
_MAX_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class EpisodeEntry:
    """One line of the index.

    Attributes:
        step: The training step; 0 is before the first update.
        split: `train` or `val`.
        task_id, episode_id, repeat_index, status, reward, is_success, error_kind, dropped_samples: As in `Episode`.
        advantage: The advantage of the whole episode, or None.
        calls, samples: Numbers of calls and samples.
        tokens_raw, tokens_distinct, tokens_trained: As in `TokenCounts`; `tokens_distinct` is None if unknown.
        seconds: Duration of the episode.
        path: The episode's file, relative to the run's folder, with forward slashes.
        forks: Number of forked calls by cause. This and the following fields are None in records of older versions.
        agents, tags, finish_reasons: Distinct values of the calls.
        error: Beginning of the error message.
        query: Beginning of the task's main query.
        answer: The answer (see `answer_of`) on one line; of a long one, the beginning and the end.
    """

    step: int
    split: Split
    task_id: str
    episode_id: str
    repeat_index: int
    status: EpisodeStatus
    reward: float | None
    is_success: bool | None
    advantage: float | None
    calls: int
    samples: int
    dropped_samples: int
    tokens_raw: int
    tokens_distinct: int | None
    tokens_trained: int
    seconds: float
    error_kind: str | None
    path: str
    forks: Mapping[str, int] | None = None
    agents: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    finish_reasons: tuple[str, ...] | None = None
    error: str | None = None
    query: str | None = None
    answer: str | None = None

    @property
    def lacks_advantage(self) -> bool:
        """Whether it is a training episode with a reward but without an advantage; see `NO_ADVANTAGE`."""
        return self.split == "train" and self.status == "ok" and self.advantage is None


class EpisodeStore:
    """Writes the episodes of one run. Thread-safe, except for `begin_step` and `end_step`.

    The episodes of a training step are written before its update: their files, and their lines in `pending.jsonl`. When
    the update has ended, their advantages are added, and the lines move to `index.jsonl`. Each episode has one line.
    """

    def __init__(self, folder: Path) -> None:
        """Open the store in the run's `folder`; `RecordError` if that fails."""
        self._folder = folder
        self._index = JsonLines(folder / _FOLDER / _INDEX)
        self._pending_file = folder / _FOLDER / _PENDING
        # By episode id: the path of the file that is written, and the line for the index.
        self._pending: dict[str, tuple[Path, dict[str, Any]]] = {}

    def write(self, episode: Episode, labels: EpisodeLabels, updates: Sequence[SampleUpdate] = ()) -> Path:
        """Write an episode and its index line, and return its file's path.

        An episode that is written twice in one step replaces its file.

        `updates` has the training of each sample; it is empty if the episode was not trained.

        Raises:
            RecordError: If the episode cannot be written.
        """
        path, row = self._write_file(episode, labels, _remembering_redactor(), updates)
        self._index.append(row)
        return path

    def begin_step(self, step: int, episodes: Sequence[tuple[Episode, TokenCounts]]) -> None:
        """Write the episodes of a training step before its update, with their token counts.

        Raises:
            RecordError: If they cannot be written.
        """
        redact = _remembering_redactor()
        self._pending = {
            episode.episode_id: self._write_file(episode, EpisodeLabels(step, "train", None, tokens), redact)
            for episode, tokens in episodes
        }
        lines = (dump_json(row) + b"\n" for _, row in self._pending.values())
        write_atomically(self._pending_file, b"".join(lines))

    def end_step(
        self, advantages: Mapping[str, float], updates: Mapping[str, Sequence[SampleUpdate]] = MappingProxyType({})
    ) -> None:
        """Add the update's results to the episodes of `begin_step`.

        Args:
            advantages: The advantages by episode id, without episodes that were not trained.
            updates: The training of each sample, by episode id.

        Raises:
            RecordError: If an episode cannot be written.
        """
        rows = []
        for name, (path, row) in self._pending.items():
            advantage = advantages.get(name)
            if advantage is not None or updates.get(name):
                self._index.check_in_place()
                with write_errors(path):
                    add_update(path, advantage, updates.get(name, ()))
            rows.append({**row, "advantage": to_jsonable(advantage, str)})
        self._index.append(*rows)
        self._pending = {}
        with write_errors(self._pending_file):
            self._pending_file.unlink(missing_ok=True)

    def _write_file(
        self, episode: Episode, labels: EpisodeLabels, redact: Redact, updates: Sequence[SampleUpdate] = ()
    ) -> tuple[Path, dict[str, Any]]:
        """Write an episode's file, and return its path and the episode's line in the index."""
        self._index.check_in_place()
        # The name is readable, valid on all systems, and unique even if task ids differ in unusual characters only.
        task = _UNSAFE.sub("_", redact(episode.task.task_id)).strip("._")[:_MAX_TASK_NAME] or "task"
        # surrogatepass: ids come from data files and may hold any character.
        digest = hashlib.sha256(episode.episode_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        name = f"{task}-{episode.repeat_index}-{digest}.json"
        path = self._folder / _FOLDER / labels.split / _step_folder(labels.step) / name
        write_atomically(path, episode_to_json(episode, labels, redact, updates))
        entry = _entry(episode, labels, path.relative_to(self._folder).as_posix(), redact)
        return path, encode(entry, redact)

    def truncate_after(self, step: int, validated: int) -> int:
        """Remove later episodes and repeated lines, and return how many lines were removed from the index.

        Arguments and errors are as for `RunRecord.truncate_after`.
        """
        last = {"train": step, "val": validated}

        def identify(row: Mapping[str, Any]) -> Hashable | None:
            entry = _decode_entry(row)
            return (entry.split, entry.step, entry.episode_id) if entry.step <= last[entry.split] else None

        # A run that dies after this line leaves files that are not in the index. The next resume removes them.
        removed, damaged = self._index.retain_rows(identify)
        for split, last_step in last.items():
            for folder in (self._folder / _FOLDER / split).glob("step_*"):
                digits = folder.name.removeprefix("step_")
                # A folder without a step number was not written by astuner.
                if digits.isdecimal() and folder.name == _step_folder(int(digits)) and int(digits) > last_step:
                    with write_errors(folder):
                        shutil.rmtree(folder)
        with write_errors(self._pending_file):
            self._pending_file.unlink(missing_ok=True)
        if damaged:
            # Add the lines of episodes whose files are there and whose lines were damaged.
            listed = {row.get("path") for _, row in read_json_lines(self._index.path)}
            for path in sorted((self._folder / _FOLDER).glob("*/step_*/*.json")):
                name = path.relative_to(self._folder).as_posix()
                if name in listed:
                    continue
                try:
                    recorded = read_recorded_episode(path)
                except RecordError as error:
                    logger.warning("an episode is not in the index and cannot be read: {}", error)
                    continue
                self._index.append(encode(_entry(recorded.episode, recorded.labels, name, str), str))
        return removed

    def close(self) -> None:
        """Move the lines of a step whose update has failed to the index, without advantages, and close the index."""
        try:
            if self._pending:
                self.end_step({})
        except RecordError as error:  # The run has ended with this error, or with the one that made the update fail.
            logger.debug("the last step is in {} only: {}", _PENDING, error)
        finally:
            self._index.close()


def _remembering_redactor() -> Redact:
    """Return a redactor for the texts of many episodes."""
    return lru_cache(_MAX_REDACTED)(current_redactor())


def _step_folder(step: int) -> str:
    return f"step_{step:06d}"


def read_index(folder: Path, on_damaged: OnDamaged | None = None) -> list[EpisodeEntry]:
    """Return one entry per episode of a run, in the order in which the episodes were first written.

    Args:
        folder: The run's folder.
        on_damaged: Called for lines that are not entries, which are skipped. If None, such a line is an error.

    Raises:
        RecordError: If there is no index, or it cannot be read.
    """
    pending = folder / _FOLDER / _PENDING
    rows: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    # The pending lines first, as they move to the index. Of two lines of an episode, the later one is valid.
    for path in (pending, folder / _FOLDER / _INDEX):
        try:
            rows |= {str(row.get("path")): (path, number, row) for number, row in read_json_lines(path, on_damaged)}
        except RecordError as error:
            if path != pending or not isinstance(error.__cause__, FileNotFoundError):
                raise
    return parsed_rows(rows.values(), _decode_entry, on_damaged)


def _decode_entry(row: Mapping[str, Any]) -> EpisodeEntry:
    entry = decode(EpisodeEntry, row)
    if entry.split not in ("train", "val") or entry.step < 0:
        raise RecordError(
            f"an episode of split {short_repr(entry.split)} and step {entry.step}; expected train or val, and a step "
            "of at least 0"
        )
    return entry


def _entry(episode: Episode, labels: EpisodeLabels, path: str, redact: Redact) -> EpisodeEntry:
    raw = sum(len(call.prompt_ids) + len(call.completion_ids) for call in episode.calls)
    trained = sum(sum(sample.train_counts) for sample in episode.samples)
    tokens = labels.tokens
    return EpisodeEntry(
        step=labels.step,
        split=labels.split,
        task_id=episode.task.task_id,
        episode_id=episode.episode_id,
        repeat_index=episode.repeat_index,
        status=episode.status,
        reward=episode.reward,
        is_success=episode.is_success,
        advantage=labels.advantage,
        calls=len(episode.calls),
        samples=len(episode.samples),
        dropped_samples=episode.dropped_samples,
        tokens_raw=raw if tokens is None else tokens.raw,
        tokens_distinct=None if tokens is None else tokens.distinct,
        tokens_trained=trained if tokens is None else tokens.trained,
        seconds=episode.end_time - episode.start_time,
        error_kind=episode.error_kind,
        path=path,
        forks=dict(Counter(call.fork.cause for call in episode.calls if call.fork is not None)),
        agents=tuple(sorted({call.agent_name for call in episode.calls if call.agent_name})),
        tags=tuple(sorted({call.target_tag for call in episode.calls})),
        finish_reasons=tuple(sorted({call.finish_reason for call in episode.calls})),
        # Redacted before they are cut: the redactor does not recognise a part of a secret.
        error=None if episode.error is None else redact(episode.error)[:_MAX_ERROR],
        query=redact(episode.task.main_query)[:_MAX_QUERY],
        answer=brief_answer(redact(answer_of(episode))),
    )


def answer_of(episode: Episode) -> str:
    """Return an episode's answer: `final_answer` in the workflow's metadata, or the text of the last LLM call.

    Empty if the episode has neither.
    """
    answer = episode.metadata.get("final_answer")
    return without_blocks(answer) if isinstance(answer, str) and answer.strip() else last_text(episode)


def without_blocks(answer: str) -> str:
    """Return the text in an answer that a workflow made with `str` from a message's content blocks.

    AgentScope's messages have such contents: `[{'type': 'text', 'text': '42'}]`. Other answers are returned as given.
    """
    if not answer.startswith("[{'type': 'text'") or len(answer) > _MAX_BLOCKS:
        return answer
    try:
        return message_text(ast.literal_eval(answer)) or answer
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # it only looks like one
        return answer


def last_text(episode: Episode) -> str:
    """Return the text of the last call's last message; empty if there is none."""
    answered = [call for call in episode.calls if call.messages]
    message = answered[-1].messages[-1] if answered else None
    return message_text(message.get("content")) if isinstance(message, Mapping) else ""


def message_text(content: object) -> str:
    """Return the text in a message's content, which is in the chat API's format."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def brief_answer(answer: str) -> str:
    """Return an answer on one line; of a long one, the beginning and the end, where conclusions stand."""
    # An answer may have megabytes.
    half = 4 * _MAX_BRIEF
    line = " ".join((answer if len(answer) <= 2 * half else f"{answer[:half]} {answer[-half:]}").split())
    kept = _MAX_BRIEF // 2
    return line if len(line) <= _MAX_BRIEF else f"{line[:kept]} … {line[-kept:]}"
