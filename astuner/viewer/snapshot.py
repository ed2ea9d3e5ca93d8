"""`astuner export --format snapshot`: the pages of a run as a folder that a browser opens without a server."""

from __future__ import annotations

import asyncio
import html
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx

from astuner.errors import RecordError
from astuner.run_record.files import dump_json
from astuner.run_record.recorded_run import find_run
from astuner.system.localhost import ADDRESS, local_hosts
from astuner.viewer import queries
from astuner.viewer.export import STATIC, bundle, file_size, megabytes
from astuner.viewer.http_server import create_app
from astuner.viewer.queries import EpisodeFilter, task_picks
from astuner.viewer.runs import IndexCache, Runs

_PORT = 80
_STYLES = ("vendor/uplot.css", "app.css", "episode.css", "runs.css")
# `file:` is the origin of a page that was opened as a file; 'self' is that of a folder behind a web server.
_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types snapshot"
)
_HEAD = re.compile(r"<link rel=\"(?:icon|stylesheet|modulepreload)\".*?>\s*|<script .*?</script>\s*")
_REQUESTS_AT_ONCE = 8
# For the estimate before writing, measured on runs of 4,000 to 100,000 episodes: the page and its script, an episode in
# the lists, and the pages of an episode and its group in proportion to its file in the record.
_BYTES_OF_PAGE = 300_000
_BYTES_PER_ROW = 500
_GROWTH = 1.6

Request = tuple[str, tuple[tuple[str, str], ...]]
"""The path of an API request below `/api/`, and its parameters."""


@dataclass
class _Contents:
    """The data files of a snapshot, with the responses that each contains."""

    requests: dict[str, list[Request]] = field(default_factory=dict)

    def add(self, file: str, path: str, **parameters: object) -> None:
        """Add a request whose response goes to a data file."""
        pairs = tuple((name, str(value)) for name, value in parameters.items())
        requests = self.requests.setdefault(file, [])
        if (path, pairs) not in requests:
            requests.append((path, pairs))


def export_snapshot(
    run: str, exp_dir: Path, out: Path | None, episodes: int | None, report: Callable[[str], None]
) -> Path:
    """Write the pages of a run to a folder and return its path. A browser opens `index.html` in it.

    All steps, tasks, charts and rows of the episode list are included. The episodes from `_choose` are
    included in full, each with comparisons with the best or the worst and with the last episode of its task.

    The arguments are those of `astuner export`; None stands for all `episodes`. `report` receives messages: contents
    and path, the files written, and each response that failed.

    Raises:
        RecordError: If there is no such run, the folder exists, or it cannot be written.
    """
    folder = find_run(run, exp_dir)
    name = folder.resolve().name
    path = out or Path(f"{name}-snapshot")
    if path.exists():
        raise RecordError(f"{path} already exists and is not overwritten; remove it, or give another --out")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    indexes = IndexCache(Runs(folder))
    try:
        with indexes.of(name).reading() as db:
            rows = queries.episodes(db, EpisodeFilter(), "step", 0, -1)["rows"]
            contents, chosen = _plan(db, name, rows, episodes)
            listed = _listed(db, rows)
        size = sum(file_size(folder / row["path"]) for row in chosen)
        expected = _BYTES_OF_PAGE + _BYTES_PER_ROW * len(rows) + _GROWTH * size
        report(
            f"writing a snapshot of {name} to {path}: {len(chosen):,} of {len(rows):,} episodes in full "
            f"({megabytes(size)} in the record), and all steps, tasks, charts and the list of episodes; about "
            f"{megabytes(expected)}"
        )
        partial.mkdir(parents=True)
        (partial / "data").mkdir()
        asyncio.run(_write_data(partial, indexes, contents, report))
        _write_part(partial, "rows", dump_json(listed))
        _write_page(partial, name, contents, len(chosen), len(rows))
        os.replace(partial, path)
    except OSError as error:
        reason = error.strerror or error
        raise RecordError(f"cannot write {path}: {reason}; give another --out") from error
    finally:
        indexes.close()
        shutil.rmtree(partial, ignore_errors=True)
    files = [file for file in path.rglob("*") if file.is_file()]
    report(
        f"wrote {len(files):,} files, {megabytes(sum(map(file_size, files)))}; open {path / 'index.html'} in a browser"
    )
    return path


def _plan(
    db: sqlite3.Connection, run: str, rows: Sequence[dict[str, Any]], limit: int | None
) -> tuple[_Contents, list[dict[str, Any]]]:
    """Return the requests of a snapshot and the episodes that it contains in full."""
    contents = _Contents()
    for path in ("run", "metrics", "charts", "results", "config", "rescores"):
        contents.add("run", path, run=run)
    contents.add("run", "runs")
    contents.add("run", "metric_names")
    for split in ("train", "val"):
        contents.add("run", "solve_rates", run=run, split=split)
    for step in queries.steps(db):
        contents.add("steps", "groups", run=run, step=step["step"], split=step["split"])
    for task in dict.fromkeys(row["task_key"] for row in rows):
        contents.add("tasks", "task", run=run, task=task)
    chosen = _choose(rows, limit)
    groups = dict.fromkeys((row["step"], row["split"], row["task_key"]) for row in chosen)
    for number, (step, split, task) in enumerate(groups):
        contents.add(f"g{number}", "group", run=run, step=step, split=split, task=task)
    picks = {}
    for split, task in dict.fromkeys((split, task) for _, split, task in groups):
        contents.add("tasks", "picks", run=run, task=task, split=split)
        picks[split, task] = task_picks(db, task, split)
    for number, row in enumerate(chosen):
        contents.add(f"e{number}", "episode", run=run, episode=row["key"])
        # An episode is compared with the last one of its task, and a good one with the worst one or the reverse.
        best, worst, last = (picks[row["split"], row["task_key"]][name] for name in ("best", "worst", "last"))
        other = worst if best and row["reward"] == best["reward"] else best
        for key in {pick["key"] for pick in (other, last) if pick} - {row["key"]}:
            contents.add(f"c{number}", "compare", run=run, episode=row["key"], **{"with": key})
    return contents, chosen


def _choose(rows: Sequence[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """Return the episodes of a snapshot, at most `limit`.

    The first one is the latest failed episode in each group of equal errors. Then follow whole groups: one of each step
    and split in turn, the first and the last steps first, then those between them. Groups with the greatest reward
    differences are preferred, as training distinguishes their episodes most. Validations keep the same tasks at each
    step.
    """
    if limit is None or limit >= len(rows):
        return list(rows)
    failed = {row["failure"]: row for row in rows if row["failure"] is not None}
    chosen = {row["id"]: row for row in failed.values()}
    groups: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        groups.setdefault((row["split"], row["step"]), {}).setdefault(row["task_key"], []).append(row)

    def preference(split: str, item: tuple[str, list[dict[str, Any]]]) -> tuple[float, str]:
        rewards = [row["reward"] for row in item[1] if row["reward"] is not None]
        spread = max(rewards) - min(rewards) if rewards and split == "train" else 0.0
        return -spread, item[0]

    ordered = [
        [episodes for _, episodes in sorted(groups[place].items(), key=lambda item: preference(place[0], item))]
        for place in _spread(sorted(groups, key=lambda place: place[1]))
    ]
    for turn in zip_longest(*ordered):
        for row in (row for group in turn if group for row in group):
            if len(chosen) >= limit:
                break
            chosen[row["id"]] = row
    return sorted(list(chosen.values())[:limit], key=lambda row: int(row["id"]))


def _spread(places: Sequence[Any]) -> list[Any]:
    """Return the places in another order: the first, the last, the middle, the middles of the halves, and so on."""
    order = dict.fromkeys((0, len(places) - 1)) if places else {}
    spans = [(0, len(places) - 1)]
    while spans:
        halves = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                order[middle] = None
                halves += [(low, middle), (middle, high)]
        spans = halves
    return [places[number] for number in order]


def _listed(db: sqlite3.Connection, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows in the list of episodes with the labels that filter them, without repeating the names."""
    labels: dict[int, list[tuple[str, str]]] = {}
    names = "select episode, kind, value from episode_labels join labels on labels.id = label"
    for number, kind, value in db.execute(names):
        labels.setdefault(number, []).append((kind, value))
    columns = [*rows[0], "labels"] if rows else []
    return {"columns": columns, "rows": [[*row.values(), labels.get(row["id"], [])] for row in rows]}


async def _write_data(folder: Path, indexes: IndexCache, contents: _Contents, report: Callable[[str], None]) -> None:
    """Write the responses of the API, as the page would receive them from the viewer."""
    transport = httpx.ASGITransport(create_app(indexes, local_hosts(_PORT)))
    gate = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def write(file: str, requests: Iterable[Request]) -> None:
        async with gate:
            answers = []
            for path, pairs in requests:
                response = await client.get(f"/api/{path}", params=pairs)
                if response.is_success:
                    answers.append(dump_json(_key(path, pairs)) + b":" + response.content)
                else:
                    report(f"skipped: {path} {dict(pairs)}: {response.json().get('error', response.text)}")
            _write_part(folder, file, b"{%b}" % b",".join(answers))

    async with httpx.AsyncClient(transport=transport, base_url=f"http://{ADDRESS}", timeout=None) as client:
        await asyncio.gather(*(write(file, requests) for file, requests in contents.requests.items()))


def _key(path: str, pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join([path, *sorted(f"{name}={value}" for name, value in pairs if value)])


def _write_part(folder: Path, name: str, content: bytes) -> None:
    """Write a data file: a call with JSON as a string, which the page parses. A literal could set a prototype."""
    quoted = content.replace(b"\\", b"\\\\").replace(b"'", b"\\'")
    (folder / "data" / f"{name}.js").write_bytes(b"astunerSnapshot.add('%b', '%b');\n" % (name.encode(), quoted))


def _write_page(folder: Path, run: str, contents: _Contents, included: int, episodes: int) -> None:
    """Write the page, its script and styles, and the contents of the snapshot."""
    files = {_key(*request): file for file, requests in contents.requests.items() for request in requests}
    about = {"included": included, "episodes": episodes, "files": files, "parts": {}}
    opened = f"#/run?{urlencode({'run': run})}"
    start = b"globalThis.astunerSnapshot = %b;\nif (!location.hash) history.replaceState(null, '', %b);\n"
    (folder / "data/contents.js").write_bytes(start % (dump_json(about), dump_json(opened)))
    (folder / "app.js").write_text(bundle("js/app.js"), encoding="utf-8")
    for name in (*_STYLES, "icon.svg"):
        shutil.copyfile(STATIC / name, folder / Path(name).name)
    styles = "".join(f'  <link rel="stylesheet" href="{Path(name).name}">\n' for name in _STYLES)
    head = (
        f'  <meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'  <link rel="icon" href="icon.svg">\n{styles}'
        '  <script defer src="data/contents.js"></script>\n  <script defer src="app.js"></script>\n</head>'
    )
    day = time.strftime("%-d %B %Y, %H:%M", time.localtime())
    notice = (
        f'<aside class="snapshot" aria-label="snapshot">Snapshot of {html.escape(run)} from {day}: {included:,} of '
        f"{episodes:,} episodes in full, which come first in the list of episodes, and all steps, tasks and charts."
        "</aside>\n  <main "
    )
    page = _HEAD.sub("", (STATIC / "index.html").read_text(encoding="utf-8"))
    page = page.replace("</head>", head, 1).replace("<main ", notice, 1)
    (folder / "index.html").write_text(page, encoding="utf-8")
