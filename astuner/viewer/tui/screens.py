"""The application of `astuner view --tui`, and its lists: the runs in a folder, a run, and its episodes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Center
from textual.screen import ModalScreen
from textual.widgets import Static

from astuner.errors import counted
from astuner.run_record.console_lines import spark_line
from astuner.run_record.metrics import read_metrics
from astuner.run_record.recorded_run import RecordedRun
from astuner.run_record.verdict import run_verdict
from astuner.viewer import queries
from astuner.viewer.queries import EpisodeFilter, Order, failures, find_episodes
from astuner.viewer.runs import IndexCache, RunList, Runs
from astuner.viewer.tui.lists import (
    STATE_STYLES,
    Listing,
    ListScreen,
    cell,
    lines,
    outcome,
    resampled,
    search_state,
)
from astuner.viewer.tui.transcript_screen import TranscriptScreen

_PAGE = 200
_MAX_POLLED = 1000
_FIRST_RESULTS = 0.5  # seconds that a search that is not complete waits for results
_ORDERS: tuple[Order, ...] = ("latest", "step", "reward", "reward_up", "tokens", "seconds")
_ORDER_NAMES = {"latest": "latest first", "step": "by step", "reward": "best first", "reward_up": "worst first",
                "tokens": "longest first", "seconds": "slowest first"}  # fmt: skip
_FILTERS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("all", {}), ("failed", {"status": "failed"}), ("dropped", {"status": "dropped"}), ("training", {"split": "train"}),
    ("validation", {"split": "val"}),
)  # fmt: skip
_CURVE_WIDTH = 24
_METRICS = (
    "reward/mean", "success/rate", "val/success_rate", "val/reward", "loss/sft", "val/loss", "loss/kl", "kl/update",
    "entropy", "grad_norm", "time/step",
)  # fmt: skip
_KEYS = """\
j k ↓ ↑  move            g G     first and last line
enter    open            escape  back, or end a search
/        search          q       quit

in a list of episodes
f        filter: all, failed, dropped, training, validation
o        order: latest, step, best, worst, longest, slowest
r        read the list again

in a transcript
n p      next and previous episode of the list"""


class EpisodesScreen(ListScreen):
    """Episodes of a run. Rows are read in pages as the cursor moves down."""

    COLUMNS = ("step", "split", "reward", "result", "task", "answer or error")
    SEARCH = "text in the messages, answers or errors of the episodes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "filter", "filter"),
        Binding("o", "order", "order"),
        Binding("r", "reload", "reload", show=False),
    ]

    def __init__(self, run: str, matching: EpisodeFilter, label: str = "", text: str = "") -> None:
        super().__init__()
        self._label = label
        self.run = run
        self.text = text
        self._matching = matching
        self._filter = 0
        self._order = 0
        self._limit = _PAGE
        self._rows: dict[str, dict[str, Any]] = {}

    def read(self) -> Listing:
        """Read the first episodes."""
        filter_name, values = _FILTERS[self._filter]
        matching = replace(self._matching, **values, text=self.text or None)
        index = self.viewer.indexes.of(self.run)
        order = _ORDERS[self._order]
        end = time.monotonic() + _FIRST_RESULTS
        page = find_episodes(index, matching, None, order, 0, self._limit)
        while page.get("search", {"done": True})["done"] is False and time.monotonic() < end:
            time.sleep(0.05)
            page = find_episodes(index, matching, None, order, 0, self._limit)
        title = Text.assemble(
            cell(self.run, 30, "bold"), f"  {counted(page['total'], 'episode')}  {_ORDER_NAMES[order]}"
        )
        if self._filter:
            title.append(f"  only {filter_name}", style="cyan")
        if self._label:
            title.append_text(Text.assemble("  ", cell(self._label, style="red")))
        if self.text:
            title.append_text(Text.assemble("  search: ", cell(self.text, 30, "cyan"), search_state(page["search"])))
        self._rows = {str(row["id"]): row for row in page["rows"]}
        width = max((self.app.size.width - 46) // 2, 12)
        cells = [(key, _episode_cells(row, width)) for key, row in self._rows.items()]
        return Listing(title, Text(), cells, page["total"])

    def open(self, key: str) -> None:
        """Show the transcript."""
        if key in (keys := list(self._rows)):  # the rows of a new list may not be shown yet
            self.app.push_screen(TranscriptScreen(self.run, list(self._rows.values()), keys.index(key)))

    def extend(self) -> None:
        """Read another page."""
        if self._limit <= len(self._rows):
            self._limit = len(self._rows) + _PAGE
            self.reload()

    def poll(self) -> None:
        """Read the list again, unless it is long."""
        if self._limit <= _MAX_POLLED:
            super().poll()

    def action_filter(self) -> None:
        """Show other episodes."""
        self._filter = (self._filter + 1) % len(_FILTERS)
        self._limit = _PAGE
        self.reload()

    def action_order(self) -> None:
        """Sort the episodes in another way."""
        self._order = (self._order + 1) % len(_ORDERS)
        self._limit = _PAGE
        self.reload()

    def action_reload(self) -> None:
        """Read the list again."""
        self.reload()


def _episode_cells(row: dict[str, Any], width: int) -> list[Text]:
    is_failed = row["status"] != "ok"
    text = f"[{row['error_kind']}] {row['error'] or ''}" if is_failed else row["answer"]
    task = cell(row["query"] or row["task"])
    if task.cell_len > width:
        # The beginning and the end, because the questions of many tasks begin alike.
        tail = task.plain[-(width // 2) :]
        task.truncate(width - len(tail) - 1)
        task.append(f"…{tail}")
    return [
        Text(str(row["step"]), justify="right"),
        cell(row["split"], 5),
        Text("-" if row["reward"] is None else f"{row['reward']:.2f}", justify="right"),
        outcome(row),
        task,
        cell(text, width, "red" if is_failed else ""),
    ]


class RunScreen(ListScreen):
    """A run: the verdict, the metrics, and the kinds of its episodes."""

    COLUMNS = ("episodes", "which")
    SEARCH = "text in the messages, answers or errors of the episodes"

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run
        self._opened: dict[str, tuple[EpisodeFilter, str]] = {}

    def read(self) -> Listing:
        """Read the run."""
        index = self.viewer.indexes.of(self.run)
        with index.reading() as db:
            counts = queries.counts(db)
            groups = index.cached(db, failures)
            series = queries.metrics(db, 0, None)["series"]
            splits = db.execute("select split, count(*) as n from episodes group by split order by split").fetchall()
        facts = RecordedRun(index.folder)
        summary, state = facts.summary, facts.state
        title = Text.assemble(cell(self.run, 50, "bold"), "  ", (state, STATE_STYLES.get(state, "")))
        title.append(f"  step {counts['step']}, {counted(counts['episodes'], 'episode')}")
        title.append(f", {counts['failed']:,} failed", style="red" if counts["failed"] else "dim")
        rows = read_metrics(index.folder, lambda _: None)
        verdict = run_verdict(summary, rows) if summary else None
        told = [*verdict.lines, *(f"  - {text}" for text in verdict.suggestions)] if verdict else []
        head = [cell(line, style="" if number else "bold") for number, line in enumerate(told)]
        head += [*([Text()] if told else []), *_metric_lines(series)]
        filters = {"all": (counts["episodes"], Text("all episodes"), EpisodeFilter())}
        names = {"train": "training", "val": "validation"}
        for row in splits:
            name = names.get(row["split"], row["split"])
            filters[f"split-{row['split']}"] = (row["n"], cell(f"{name} episodes"), EpisodeFilter(split=row["split"]))
        labels: dict[str, str] = {}
        for group in groups["groups"]:
            error = f"[{group['kind']}] {group['error'] or ''}"
            labels[f"failure-{group['key']}"] = error
            text = cell(error, style="red")
            text.append(f"  ({counted(group['tasks'], 'task')})", style="dim")
            filters[f"failure-{group['key']}"] = (group["episodes"], text, EpisodeFilter(failure=group["key"]))
        self._opened = {key: (matching, labels.get(key, "")) for key, (_, _, matching) in filters.items()}
        cells = [(key, [Text(f"{n:,}", justify="right"), text]) for key, (n, text, _) in filters.items()]
        return Listing(title, lines(head), cells, len(cells))

    def open(self, key: str) -> None:
        """Show the episodes of the row."""
        self.app.push_screen(EpisodesScreen(self.run, *self._opened[key]))

    def _search_for(self, text: str) -> None:
        if text:
            self.app.push_screen(EpisodesScreen(self.run, EpisodeFilter(), text=text))


def _metric_lines(series: Mapping[str, Sequence[Sequence[float | None]]]) -> Iterator[Text]:
    """Yield a line with the curve for each main metric."""
    for name in _METRICS:
        values = [value for _, _, value in series.get(name, ()) if value is not None]
        if values:
            curve = spark_line(resampled(values, _CURVE_WIDTH), _CURVE_WIDTH)
            yield Text.assemble(
                f"{name:<18}", (f"{curve:<{_CURVE_WIDTH}}", "cyan"), f"  {values[0]:.4g} → {values[-1]:.4g}",
                (f"  {min(values):.4g} to {max(values):.4g}", "dim"),
            )  # fmt: skip


class RunsScreen(ListScreen):
    """The runs of a folder."""

    COLUMNS = ("run", "state", "steps", "reward", "success", "failed", "started")
    SEARCH = "part of a name, a note, a tag, a state or a model"

    def read(self) -> Listing:
        """Read the runs."""
        runs = self.viewer.run_list.rows()
        shown = [row for row in runs if self.text.lower() in _searched_text(row)]
        title = Text.assemble("astuner  ", cell(str(self.viewer.folder), 40), f"  {counted(len(shown), 'run')}")
        if self.text:
            title.append(f"  search: {cell(self.text, 30)}")
        if not runs:
            title.append("  there are no runs in this folder", style="yellow")
        name_width = max(self.app.size.width - 62, 14)
        return Listing(title, Text(), [(row["name"], _run_cells(row, name_width)) for row in shown], len(shown))

    def open(self, key: str) -> None:
        """Show the run."""
        self.app.push_screen(RunScreen(key))


def _searched_text(row: Mapping[str, Any]) -> str:
    words = (row["name"], row["state"], row["note"], *row["tags"], row["model"], row["backbone"], row["algorithm"])
    return " ".join(str(word) for word in words if word).lower()


def _run_cells(row: Mapping[str, Any], name_width: int) -> list[Text]:
    validation, rewards = row["validation"] or {}, row["rewards"]
    rates = [
        "?" if not entry or entry["success_rate"] is None else f"{entry['success_rate']:.0%}"
        for entry in (validation.get("before"), validation.get("after"))
    ]
    started = time.strftime("%d %b %H:%M", time.localtime(row["started"])) if row["started"] else "-"
    return [
        cell(row["name"], name_width, "bold"),
        cell(row["state"], style=STATE_STYLES.get(row["state"], "")),
        Text(str(row["counts"]["step"]), justify="right"),
        Text(f"{spark_line(resampled(rewards, 6), 6)} {rewards[-1]:.2f}" if rewards else "-"),
        Text("-" if rates == ["?", "?"] else rates[1] if rates[0] == "?" else " → ".join(rates)),
        Text(str(row["counts"]["failed"]), style="red" if row["counts"]["failed"] else "dim", justify="right"),
        Text(started),
    ]


class KeysScreen(ModalScreen[None]):
    """The list of the keys. Any key closes it."""

    def compose(self) -> ComposeResult:
        """Create the text."""
        with Center():
            yield Static(_KEYS, id="keys", markup=False)

    def on_key(self) -> None:
        """Close the list."""
        self.dismiss()


class TerminalViewer(App[None]):
    """Shows recorded runs, their episodes and transcripts in the terminal, and follows active runs.

    Attributes:
        first_screens: the number of screens that `escape` does not close.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "keys", "keys"),
    ]
    CSS = """
    #title { background: $primary-background; padding: 0 1; height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #head { height: auto; max-height: 60%; padding: 0 1; }
    #lines { width: 100%; }
    DataTable { height: 1fr; scrollbar-size: 1 1; }
    RichLog { height: 1fr; padding: 0 1; overflow-x: hidden; scrollbar-size: 1 1; scrollbar-gutter: stable; }
    #head { scrollbar-size: 1 1; }
    #search { dock: bottom; height: 3; }
    KeysScreen { align: center middle; }
    #keys { width: 68; padding: 1 2; border: round $primary; background: $surface; }
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        """Create the application; `cache` holds the indexes' databases, by default in the user's cache.

        Raises:
            RecordError: there is no such folder.
        """
        super().__init__()
        self.folder = folder
        self.indexes = IndexCache(Runs(folder), cache)
        self.run_list = RunList(self.indexes)
        self.first_screens = 2  # the application's own screen is below the first one

    def on_mount(self) -> None:
        """Show the runs, or the only run if the folder is a run's folder."""
        runs = self.indexes.runs.all()
        is_run = list(runs.values()) == [self.folder]
        self.push_screen(RunScreen(next(iter(runs))) if is_run else RunsScreen())

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(KeysScreen())

    def on_unmount(self) -> None:
        """Close the indexes."""
        self.indexes.close()
