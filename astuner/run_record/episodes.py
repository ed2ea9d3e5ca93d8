"""The episodes of a run: one file each, and an index with one line each, so that a run can be listed fast.

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
from astuner.run_record.codec import decode, encode
from astuner.run_record.episode_file import EpisodeLabels, episode_to_json
from astuner.run_record.files import Damaged, JsonLines, numbered_json_lines, storing, write_atomically
from astuner.run_record.secrets import current_redactor
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, EpisodeStatus, Split

_FOLDER = "episodes"
_INDEX = "index.jsonl"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_TASK_NAME = 80
_LONGEST_ERROR = 500
_LONGEST_QUERY = 200


@dataclass(frozen=True, slots=True)
class EpisodeEntry:
    """One line of the index.

    Attributes:
        step: the training step; 0 is before the first update.
        split: `train` or `val`.
        task_id, episode_id, repeat_index, status, reward, is_success, error_kind, dropped_samples: as in `Episode`.
        advantage: what the trainer gave it as a whole, else None.
        calls, samples: how many.
        tokens_raw, tokens_distinct, tokens_trained: as in `TokenCounts`; `tokens_distinct` is None where the writer
            was not told.
        seconds: from the episode's start to its end.
        path: the episode's file, relative to the run's folder, with forward slashes.
        forks: how many of its calls are forks, by cause; None in records that an older version wrote.
        agents, tags, finish_reasons: those that its calls have, each once; None likewise.
        error: how its error begins; None likewise.
        query: how its task's main query begins; None likewise.
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
    """Writes the episodes of one run; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Open the store in the run's `folder`.

        Raises:
            RecordError: the index cannot be opened.
        """
        self._folder = folder
        self._index = JsonLines(folder / _FOLDER / _INDEX)

    def write(self, episode: Episode, labels: EpisodeLabels, updates: Sequence[SampleUpdate] = ()) -> Path:
        """Write an episode, how its samples were trained, and its line of the index; return the file.

        The same episode of the same step written again replaces its file.

        Raises:
            RecordError: it cannot be written.
        """
        redact = cache(current_redactor())
        name = _file_name(episode, redact(episode.task.task_id))
        path = self._folder / _FOLDER / labels.split / _step_name(labels.step) / name
        write_atomically(path, episode_to_json(episode, labels, redact, updates))
        # Redacted before it is cut: what is left of a secret would not be known for one.
        error = None if episode.error is None else redact(episode.error)[:_LONGEST_ERROR]
        query = redact(episode.task.main_query)[:_LONGEST_QUERY]
        entry = replace(_entry(episode, labels, path.relative_to(self._folder).as_posix()), error=error, query=query)
        self._index.append(encode(entry, redact))
        return path

    def truncate_after(self, step: int) -> int:
        """Remove the episodes of steps later than `step`; return how many the index had.

        Raises:
            RecordError: they cannot be removed.
        """
        # A run that dies in between leaves files without a line, which the next resume removes.
        removed = self._index.keep_only(lambda row: int(row["step"]) <= step)
        for later in (self._folder / _FOLDER).glob("*/step_*"):
            if _step_of(later) > step:
                with storing(later):
                    shutil.rmtree(later)
        return removed

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def read_index(folder: Path, damaged: Damaged | None = None) -> list[EpisodeEntry]:
    """Return what the run in `folder` recorded, one entry an episode, in the order in which they were first written.

    Args:
        folder: the run's.
        damaged: told of lines that are no entries, instead of raising; they are left out.

    Raises:
        RecordError: there is no index, or it cannot be read.
    """
    path = folder / _FOLDER / _INDEX
    # An episode that was written again has two lines; the later one holds.
    rows = {str(row.get("path")): (number, row) for number, row in numbered_json_lines(path, damaged)}
    entries = []
    for number, row in rows.values():
        try:
            entries.append(decode(EpisodeEntry, row))
        except RecordError as error:
            refused = RecordError(f"{path}, line {number}: {error}")
            if damaged is None:
                raise refused from error
            damaged(refused)
    return entries


def _entry(episode: Episode, labels: EpisodeLabels, path: str) -> EpisodeEntry:
    raw = sum(len(call.prompt_ids) + len(call.completion_ids) for call in episode.calls)
    trained = sum(sum(sample.loss_mask) for sample in episode.samples)
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


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step_")
    # Not a folder of ours: it belongs to no step, so that it is never removed.
    return int(digits) if digits.isdecimal() else -1


def _file_name(episode: Episode, task_id: str) -> str:
    """Name an episode's file: readable, valid everywhere, and its own even where task ids differ in odd characters."""
    readable = _UNSAFE.sub("_", task_id).strip("._")[:_LONGEST_TASK_NAME] or "task"
    # surrogatepass: ids come from data files and may hold anything.
    identity = hashlib.sha256(episode.episode_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{readable}-{episode.repeat_index}-{identity}.json"
