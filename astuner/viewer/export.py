"""`astuner export`: a run's episodes as JSON lines, its samples as Parquet, an episode as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from astuner.errors import RecordError
from astuner.run_record import EpisodeEntry, RecordedEpisode, by_token, find_episode, find_run, read_index
from astuner.run_record.files import Damaged, dump_json
from astuner.run_record.plain import to_plain
from astuner.viewer.episode_view import episode_view, read_episode_at
from astuner.viewer.single_file import single_file
from astuner.viewer.token_texts import find_token_texts

Format = Literal["jsonl", "parquet", "html"]
_ROWS_AT_ONCE = 256


def export_run(
    run: str, exp_dir: Path, to: Format, out: Path | None, episode: str | None, say: Callable[[str], None]
) -> Path:
    """Write a run's episodes, or one of them, into a file and return its path.

    Args:
        run: the run's folder, or its name under `exp_dir`.
        exp_dir: where runs are.
        to: `jsonl`, a whole episode a line; `parquet`, a training sample a row; `html`, one episode as a page that
            needs nothing else.
        out: the file; by default the run's or the episode's name in the present folder.
        episode: an episode's id, or how it alone begins; `html` needs one.
        say: told of each line of the index, and each episode, that is damaged and left out.

    Raises:
        RecordError: there is no such run or episode, the file is there already or cannot be written, or all that
            should be in it is damaged.
    """
    folder = find_run(run, exp_dir)
    left_out = 0

    def skip(error: RecordError) -> None:
        nonlocal left_out
        left_out += 1
        say(f"left out: {error}")

    entries = read_index(folder, skip)
    if episode is not None:
        entries = [find_episode(episode, entries)]
    elif to == "html":
        raise RecordError("an HTML file shows one episode: name it with --episode (astuner view lists them)")
    path = out or Path(f"{folder.resolve().name if episode is None else Path(entries[0].path).stem}.{to}")
    if path.is_dir():
        raise RecordError(f"{path} is a folder: give --out the file to write, such as {path / f'episodes.{to}'}")
    if path.exists():
        raise RecordError(f"{path} is there already, and is not written over; remove it, or give another --out")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            written = _WRITERS[to](folder, entries, partial, skip)
            if left_out and not written:
                raise RecordError(f"{folder}: nothing could be exported; see above for what is damaged")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RecordError(
            f"cannot write the export {path}: {reason}; make its folder, or give another --out"
        ) from error


def _readable(
    folder: Path, entries: Iterable[EpisodeEntry], skip: Damaged
) -> Iterator[tuple[EpisodeEntry, RecordedEpisode]]:
    """Yield the episodes; leave out what is no episode, or lies elsewhere."""
    for entry in entries:
        try:
            recorded = read_episode_at(folder, entry.path)
        except RecordError as error:
            skip(error)
        else:
            yield entry, recorded


def _write_lines(folder: Path, entries: list[EpisodeEntry], path: Path, skip: Damaged) -> int:
    written = 0
    with path.open("xb") as file:
        for entry, _ in _readable(folder, entries, skip):
            file.write((folder / entry.path).read_bytes().strip() + b"\n")
            written += 1
    return written


def _write_samples(folder: Path, entries: list[EpisodeEntry], path: Path, skip: Damaged) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([
        ("step", pa.int64()), ("split", pa.string()), ("task_id", pa.string()), ("episode_id", pa.string()),
        ("repeat_index", pa.int64()), ("reward", pa.float64()), ("advantage", pa.float64()),
        ("sample", pa.int64()), ("weight", pa.float64()), ("token_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())), ("logprobs", pa.list_(pa.float64())),
        ("advantages", pa.list_(pa.float64())), ("current_logprobs", pa.list_(pa.float64())),
        ("position_ids", pa.list_(pa.int64())), ("parents", pa.list_(pa.int64())), ("calls", pa.list_(pa.string())),
    ])  # fmt: skip
    rows = _sample_rows(_readable(folder, (entry for entry in entries if entry.samples), skip))
    written = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            written += len(batch)
    return written


def _sample_rows(episodes: Iterable[tuple[EpisodeEntry, RecordedEpisode]]) -> Iterator[dict[str, Any]]:
    for entry, recorded in episodes:
        for number, sample in enumerate(recorded.episode.samples):
            # Null for context; the whole list where the record does not have it.
            update = recorded.updates[number] if number < len(recorded.updates) else None
            advantages, current = by_token(sample, update) if update else (None, None)
            yield {
                "step": entry.step,
                "split": entry.split,
                "task_id": _utf8(entry.task_id),
                "episode_id": _utf8(entry.episode_id),
                "repeat_index": entry.repeat_index,
                "reward": entry.reward,
                "advantage": entry.advantage,
                "sample": number,
                "weight": sample.weight,
                "token_ids": sample.token_ids,
                "loss_mask": sample.loss_mask,
                "logprobs": sample.logprobs,
                "advantages": advantages,
                "current_logprobs": None if update is None or update.logprobs is None else current,
                "position_ids": sample.position_ids,
                "parents": sample.parents,
                "calls": [_utf8(span.call_id) for span in sample.spans],
            }


def _write_page(folder: Path, entries: list[EpisodeEntry], path: Path, _skip: Damaged) -> int:
    (entry,) = entries
    view = to_plain(episode_view(read_episode_at(folder, entry.path), find_token_texts(folder)), lambda text: text)
    path.write_bytes(single_file(dump_json(view)))
    return 1


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_WRITERS: dict[Format, Callable[[Path, list[EpisodeEntry], Path, Damaged], int]] = {
    "jsonl": _write_lines,
    "parquet": _write_samples,
    "html": _write_page,
}
