"""`astuner export`: a run's episodes as JSON lines, its samples as Parquet, or one episode as an HTML file.

A page in a file has its modules as one classic script, because browsers do not load modules from files (`file://`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from astuner.errors import RecordError, counted
from astuner.run_record.episode_file import RecordedEpisode
from astuner.run_record.episodes import NO_ADVANTAGE, EpisodeEntry, read_index
from astuner.run_record.files import OnDamaged, dump_json
from astuner.run_record.jsonable import to_jsonable
from astuner.run_record.recorded_run import RecordedRun, find_episode, find_run
from astuner.run_record.updates import by_token, entropy_by_token
from astuner.viewer.episode_view import episode_view, read_episode_at
from astuner.viewer.index import valid_utf8
from astuner.viewer.token_texts import find_token_texts

STATIC = Path(__file__).parent / "static"
_COMMENT = re.compile(r"^/\*.*?\*/$", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^import (?:(?P<default>\w+)|\{(?P<names>[^}]*)\}) from \"(?P<module>[^\"]+)\";$", re.MULTILINE)
_DYNAMIC_IMPORT = re.compile(r"\bimport\(\"([^\"]+)\"\)")
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_EXPORT_DEFAULT = re.compile(r"^export \{ (\w+) as default \};$", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
_LOADER = """
const loaded = {};
const load = (name) => {
  if (!(name in loaded)) { loaded[name] = {}; modules[name](loaded[name]); }
  return loaded[name];
};
"""
Format = Literal["jsonl", "parquet", "html"]
_ROWS_PER_BATCH = 256
_PAGE_STYLES = ("app.css", "episode.css")
_PAGE_START = """
const { brief } = load("js/dom.js"), { currentAddress } = load("js/address.js");
const view = JSON.parse(document.getElementById("episode").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", paint);
paint();
document.title = brief(view.episode.episode_id, 60);
document.getElementById("main").append(...exported.episodeContent(view, currentAddress().query));
"""


def bundle(entry: str, start: str = "") -> str:
    """Return a script with a module of the page and all modules that it imports.

    Args:
        entry: Path of the module below the static files, such as `js/app.js`.
        start: Code to run after the module, which finds the names that the module exports in `exported`.

    Raises:
        ValueError: If a module has an import or an export in another form than the page's modules.
    """
    sources: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name], imported = _as_function(name)
            waiting += imported
    modules = ",\n".join(f"{json.dumps(name)}: (exported) => {{\n{source}\n}}" for name, source in sources.items())
    return (
        f'(() => {{\n"use strict";\nconst modules = {{\n{modules}\n}};{_LOADER}'
        f"const exported = load({json.dumps(entry)});\n{start}\n}})();\n"
    )


def _as_function(name: str) -> tuple[str, list[str]]:
    """Return the body of a function that runs a module, and the modules that it imports."""
    source = _COMMENT.sub("", (STATIC / name).read_text(encoding="utf-8"))
    imported: list[str] = []

    def path_of(relative: str) -> str:
        parts: list[str] = []
        for part in (PurePosixPath(name).parent / relative).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        imported.append("/".join(parts))
        return json.dumps(imported[-1])

    def static_import(match: re.Match[str]) -> str:
        names = f"default: {match['default']}" if match["default"] else match["names"].replace(" as ", ": ")
        return f"const {{ {names.strip()} }} = load({path_of(match['module'])});"

    names: list[str] = []
    source = _IMPORT.sub(static_import, source)
    source = _DYNAMIC_IMPORT.sub(lambda match: f"Promise.resolve(load({path_of(match[1])}))", source)
    source = _EXPORT.sub(lambda match: names.append(match[1]) or "", source)  # type: ignore[func-returns-value]
    source = _EXPORT_DEFAULT.sub(lambda match: f"exported.default = {match[1]};", source)
    if left := _LEFT.search(source):
        raise ValueError(f"{name}: this form of import or export cannot be bundled: {left[0]!r}")
    return f"{source}\nObject.assign(exported, {{ {', '.join(names)} }});", imported


def export_run(
    run: str, exp_dir: Path, to: Format, out: Path | None, episode: str | None, report: Callable[[str], None]
) -> Path:
    """Write a run's episodes, or one episode, to a file and return its path.

    For the arguments, see `astuner export`. `report` receives messages: the expected size and the path, the size
    written, each damaged line and episode, which are skipped, and a note if episodes have no advantage.

    Raises:
        RecordError: If there is no such run or episode, the file exists or cannot be written, or all episodes are
            damaged.
    """
    folder = find_run(run, exp_dir)
    skipped = 0

    def skip(error: RecordError) -> None:
        nonlocal skipped
        skipped += 1
        report(f"skipped: {error}")

    entries = read_index(folder, skip)
    if without_advantage := sum(entry.lacks_advantage for entry in entries):
        report(f"{without_advantage} training episodes are {NO_ADVANTAGE}")
    if episode is not None:
        entries = [find_episode(episode, entries)]
    elif to == "html":
        raise RecordError("an HTML file shows one episode; name it with --episode (`astuner view` lists the episodes)")
    path = out or Path(f"{folder.resolve().name if episode is None else Path(entries[0].path).stem}.{to}")
    if path.is_dir():
        raise RecordError(f"{path} is a folder; give a file with --out, such as {path / f'episodes.{to}'}")
    if path.exists():
        raise RecordError(f"{path} already exists and is not overwritten; remove it, or give another --out")
    contents = counted(len(entries), "episode")
    recorded = megabytes(sum(file_size(folder / entry.path) for entry in entries))
    if to == "parquet":
        trained = sum(entry.tokens_trained or 0 for entry in entries)
        contents = f"{sum(entry.samples for entry in entries):,} samples of {contents}"
        report(f"writing {contents} ({trained:,} trained tokens, {recorded} of JSON) to {path}")
    else:
        report(f"writing {contents} ({recorded} in the record) to {path}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if to == "html":
            partial.write_bytes(episode_page(folder, entries[0].path))
        elif not (_write_lines if to == "jsonl" else _write_samples)(folder, entries, partial, skip) and skipped:
            raise RecordError(f"{folder}: nothing could be exported; the messages above name the damaged episodes")
        os.replace(partial, path)
        report(f"wrote {megabytes(path.stat().st_size)}")
    except OSError as error:
        reason = error.strerror or error
        raise RecordError(f"cannot write {path}: {reason}; create its folder, or give another --out") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def file_size(file: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def megabytes(size: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _read_episodes(
    folder: Path, entries: Iterable[EpisodeEntry], skip: OnDamaged
) -> Iterator[tuple[EpisodeEntry, RecordedEpisode]]:
    """Yield the episodes; skip damaged ones and files outside the run's folder."""
    for entry in entries:
        try:
            recorded = read_episode_at(folder, entry.path)
        except RecordError as error:
            skip(error)
        else:
            yield entry, recorded


def _write_lines(folder: Path, entries: list[EpisodeEntry], path: Path, skip: OnDamaged) -> int:
    written = 0
    with path.open("xb") as file:
        for entry, _ in _read_episodes(folder, entries, skip):
            file.write((folder / entry.path).read_bytes().strip() + b"\n")
            written += 1
    return written


def _write_samples(folder: Path, entries: list[EpisodeEntry], path: Path, skip: OnDamaged) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([
        ("step", pa.int64()), ("split", pa.string()), ("task_id", pa.string()), ("episode_id", pa.string()),
        ("repeat_index", pa.int64()), ("reward", pa.float64()), ("advantage", pa.float64()),
        ("sample", pa.int64()), ("weight", pa.float64()), ("token_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())), ("logprobs", pa.list_(pa.float64())),
        ("advantages", pa.list_(pa.float64())), ("current_logprobs", pa.list_(pa.float64())),
        ("entropies", pa.list_(pa.float64())),
        ("position_ids", pa.list_(pa.int64())), ("parents", pa.list_(pa.int64())), ("calls", pa.list_(pa.string())),
    ])  # fmt: skip
    rows = _sample_rows(_read_episodes(folder, (entry for entry in entries if entry.samples), skip))
    written = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _ROWS_PER_BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            written += len(batch)
    return written


def _sample_rows(episodes: Iterable[tuple[EpisodeEntry, RecordedEpisode]]) -> Iterator[dict[str, Any]]:
    for entry, recorded in episodes:
        for number, sample in enumerate(recorded.episode.samples):
            # Null for untrained tokens; the whole list is null if the record does not have the values.
            update = recorded.updates[number] if number < len(recorded.updates) else None
            advantages, current = by_token(sample, update) if update else (None, None)
            yield {
                "step": entry.step,
                "split": entry.split,
                "task_id": valid_utf8(entry.task_id),
                "episode_id": valid_utf8(entry.episode_id),
                "repeat_index": entry.repeat_index,
                "reward": entry.reward,
                "advantage": entry.advantage,
                "sample": number,
                "weight": sample.weight,
                "token_ids": sample.token_ids,
                "loss_mask": sample.train_counts,
                "logprobs": sample.logprobs,
                "advantages": advantages,
                "current_logprobs": None if update is None or update.logprobs is None else current,
                "entropies": None if update is None or update.entropies is None else entropy_by_token(sample, update),
                "position_ids": sample.position_ids,
                "parents": sample.parents,
                "calls": [valid_utf8(span.call_id) for span in sample.spans],
            }


def episode_page(folder: Path, path: str) -> bytes:
    """Return an episode's page as one HTML file, with its modules, style and data; arguments as `read_episode_at`.

    Its content security policy allows the page's script only, by hash.

    Raises:
        RecordError: If the episode cannot be read.
    """
    view = episode_view(read_episode_at(folder, path), find_token_texts(folder), RecordedRun(folder).config)
    # In JSON `<` occurs in strings only. With the escape, the browser sees no tag in the data.
    data = dump_json(to_jsonable(view, lambda text: text)).replace(b"<", b"\\u003c")
    script = bundle("js/episode.js", _PAGE_START).encode()
    style = b"".join((STATIC / name).read_bytes() for name in _PAGE_STYLES)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = (
        b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'.encode(),
        b'<meta name="viewport" content="width=device-width, initial-scale=1"><title>astuner</title><style>',
        style, b'</style></head><body><main id="main"></main><script type="application/json" id="episode">',
        data, b"</script><script>", script, b"</script></body></html>\n",
    )  # fmt: skip
    return b"".join(parts)


def _hash(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
