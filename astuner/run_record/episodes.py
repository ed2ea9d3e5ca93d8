"""The episodes of a run: one file per episode, and an index with one line per episode, which is fast to list.

episodes/index.jsonl
episodes/{train|val}/step_000012/{task id}-{repeat}-{hash of episode id}.json
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from astuner.errors import RecordError
from astuner.run_record.episode_file import EpisodeLabels, episode_to_json
from astuner.run_record.files import JsonLines, OnDamaged, read_json_lines, write_atomically, write_errors
from astuner.run_record.jsonable import decode, encode
from astuner.run_record.secrets import current_redactor
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, EpisodeStatus, Split

_FOLDER = "episodes"
_INDEX = "index.jsonl"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
# Longest texts in a file name and in the index, in characters.
_MAX_TASK_NAME = 80
_MAX_ERROR = 500
_MAX_QUERY = 200


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


class EpisodeStore:
    """Writer of the episodes of one run. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open the store in the run's `folder`.

        Raises:
            RecordError: If the index cannot be opened.
        """
        self._folder = folder
        self._index = JsonLines(folder / _FOLDER / _INDEX)

    def write(self, episode: Episode, labels: EpisodeLabels, updates: Sequence[SampleUpdate] = ()) -> Path:
        """Write an episode and its line of the index, and return the path of its file.

        An episode that is written twice in one step replaces its file.

        Args:
            episode: The episode.
            labels: Its step, split, advantage and token counts.
            updates: The training of each sample; empty if the episode was not trained.

        Raises:
            RecordError: If the episode cannot be written.
        """
        redact = cache(current_redactor())
        # The name is readable, valid on all systems, and unique even if task ids differ in unusual characters only.
        task = _UNSAFE.sub("_", redact(episode.task.task_id)).strip("._")[:_MAX_TASK_NAME] or "task"
        # surrogatepass: ids come from data files and may hold any character.
        digest = hashlib.sha256(episode.episode_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        name = f"{task}-{episode.repeat_index}-{digest}.json"
        path = self._folder / _FOLDER / labels.split / f"step_{labels.step:06d}" / name
        write_atomically(path, episode_to_json(episode, labels, redact, updates))
        # Redacted before it is cut: the redactor does not recognise a part of a secret.
        error = None if episode.error is None else redact(episode.error)[:_MAX_ERROR]
        query = redact(episode.task.main_query)[:_MAX_QUERY]
        entry = replace(_entry(episode, labels, path.relative_to(self._folder).as_posix()), error=error, query=query)
        self._index.append(encode(entry, redact))
        return path

    def truncate_after(self, step: int) -> int:
        """Remove the episodes of steps after `step`, and return their number in the index.

        Raises:
            RecordError: If they cannot be removed.
        """
        # A run that dies after this line leaves files that are not in the index. The next resume removes them.
        removed = self._index.filter_rows(lambda row: int(row["step"]) <= step)
        for folder in (self._folder / _FOLDER).glob("*/step_*"):
            digits = folder.name.removeprefix("step_")
            # A folder without a step number was not written by astuner.
            if digits.isdecimal() and int(digits) > step:
                with write_errors(folder):
                    shutil.rmtree(folder)
        return removed

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def read_index(folder: Path, on_damaged: OnDamaged | None = None) -> list[EpisodeEntry]:
    """Return one entry per episode of a run, in the order in which the episodes were first written.

    Args:
        folder: The run's folder.
        on_damaged: Called for lines that are no entries, which are skipped; without it, they raise.

    Raises:
        RecordError: If there is no index, or it cannot be read.
    """
    path = folder / _FOLDER / _INDEX
    # An episode that was written twice has two lines; the later line is valid.
    rows = {str(row.get("path")): (number, row) for number, row in read_json_lines(path, on_damaged)}
    entries = []
    for number, row in rows.values():
        try:
            entries.append(decode(EpisodeEntry, row))
        except RecordError as error:
            damaged = RecordError(f"{path}, line {number}: {error}")
            if on_damaged is None:
                raise damaged from error
            on_damaged(damaged)
    return entries


def _entry(episode: Episode, labels: EpisodeLabels, path: str) -> EpisodeEntry:
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
    )
