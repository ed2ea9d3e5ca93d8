"""The screens: the list of runs, a run, its episodes, and the transcript of an episode."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input, RichLog, Static

from astuner.errors import AstunerError
from astuner.launcher.transcripts import EpisodeTranscript
from astuner.launcher.tui.lists import (
    STATE_STYLES,
    Listing,
    ListScreen,
    cell,
    count,
    lines,
    number,
    outcome,
    search_state,
)
from astuner.run_record import RecordedEpisode, config_of, read_metrics, run_state, run_verdict, spark_line, summary_of
from astuner.viewer import queries
from astuner.viewer.episode_search import find_episodes
from astuner.viewer.episode_view import read_episode_at
from astuner.viewer.failures import failures
from astuner.viewer.queries import EpisodeFilter, Order
from astuner.viewer.verdict import verdict_view

_PAGE = 200
_MAX_POLLED = 1000
_FIRST_RESULTS = 0.5  # seconds that a search that is not complete waits for results
_CURVE_WIDTH = 24
_FOLDED_SIZE = 500_000
_METRICS = (
    "reward/mean", "success/rate", "val/success_rate", "val/reward", "loss/sft", "val/loss", "loss/kl", "kl/update",
    "entropy", "grad_norm", "time/step",
)  # fmt: skip
_ORDERS: tuple[Order, ...] = ("latest", "step", "reward", "reward_up", "tokens", "seconds")
_ORDER_NAMES = {"latest": "latest first", "step": "by step", "reward": "best first", "reward_up": "worst first",
                "tokens": "longest first", "seconds": "slowest first"}  # fmt: skip
_FILTERS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("all", {}), ("failed", {"status": "failed"}), ("dropped", {"status": "dropped"}), ("training", {"split": "train"}),
    ("validation", {"split": "val"}),
)  # fmt: skip


class RunsScreen(ListScreen):
    """The runs of a folder."""

    COLUMNS = ("run", "state", "steps", "reward", "success", "failed", "started")
    SEARCH = "part of a name, a note, a tag, a state or a model"

    def read(self) -> Listing:
        """Read the runs."""
        runs = self.viewer.run_list.rows()
        shown = [row for row in runs if self.text.lower() in _words_of(row)]
        title = Text.assemble("astuner  ", cell(str(self.viewer.folder), 40), f"  {count(len(shown), 'run')}")
        if self.text:
            title.append(f"  search: {cell(self.text, 30)}")
        if not runs:
            title.append("  there are no runs in this folder", style="yellow")
        name_width = max(self.app.size.width - 62, 14)
        return Listing(title, Text(), [(row["name"], _run_cells(row, name_width)) for row in shown], len(shown))

    def open(self, key: str) -> None:
        """Show the run."""
        self.app.push_screen(RunScreen(key))


def _words_of(row: Mapping[str, Any]) -> str:
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
        Text(f"{spark_line(_resampled(rewards, 6), 6)} {rewards[-1]:.2f}" if rewards else "-"),
        Text("-" if rates == ["?", "?"] else rates[1] if rates[0] == "?" else " → ".join(rates)),
        Text(str(row["counts"]["failed"]), style="red" if row["counts"]["failed"] else "dim", justify="right"),
        Text(started),
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
        summary = summary_of(index.folder)
        state = run_state(index.folder, summary)
        title = Text.assemble(cell(self.run, 50, "bold"), "  ", (state, STATE_STYLES.get(state, "")))
        title.append(f"  step {counts['step']}, {count(counts['episodes'], 'episode')}")
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
            text.append(f"  ({count(group['tasks'], 'task')})", style="dim")
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
    """Yield a line with the curve of each of the main metrics."""
    for name in _METRICS:
        values = [value for _, _, value in series.get(name, ()) if value is not None]
        if values:
            curve = spark_line(_resampled(values, _CURVE_WIDTH), _CURVE_WIDTH)
            yield Text.assemble(
                f"{name:<18}", (f"{curve:<{_CURVE_WIDTH}}", "cyan"), f"  {values[0]:.4g} → {values[-1]:.4g}",
                (f"  {min(values):.4g} to {max(values):.4g}", "dim"),
            )  # fmt: skip


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` means of consecutive values."""
    if len(values) <= width:
        return list(values)
    bounds = [round(index * len(values) / width) for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


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
        title = Text.assemble(cell(self.run, 30, "bold"), f"  {count(page['total'], 'episode')}  {_ORDER_NAMES[order]}")
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
            self.app.push_screen(EpisodeScreen(self.run, list(self._rows.values()), keys.index(key)))

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
    return [
        Text(str(row["step"]), justify="right"),
        cell(row["split"], 5),
        number(row["reward"]),
        outcome(row),
        _ends(row["query"] or row["task"], width),
        cell(text, width, "red" if is_failed else ""),
    ]


def _ends(text: str, width: int) -> Text:
    """Return the beginning and the end of a text, because the questions of many tasks begin alike."""
    line = cell(text)
    if line.cell_len <= width:
        return line
    head, tail = line.copy(), line.plain[-(width // 2) :]
    head.truncate(width - len(tail) - 1)
    return head.append(f"…{tail}")


class EpisodeScreen(Screen[None]):
    """The transcript of an episode, with its reward and the judge's verdict."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
        Binding("g", "end(False)", "first line", show=False),
        Binding("G", "end(True)", "last line", show=False),
        Binding("n", "step(1)", "next"),
        Binding("p", "step(-1)", "previous"),
        Binding("slash", "search", "search"),
        Binding("escape", "back", "back"),
    ]

    def __init__(self, run: str, rows: Sequence[dict[str, Any]], place: int) -> None:
        super().__init__()
        self._run_name = run
        self._rows = rows
        self._place = place
        self._lines: list[str] = []
        self._found = -1

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static("loading …", id="title")
        yield RichLog(wrap=False, markup=False, highlight=False, auto_scroll=False, min_width=0)
        yield Input(placeholder="text in this transcript; enter repeats the search", id="search")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Focus the transcript."""
        self.query_one(Input).display = False
        self.query_one(RichLog).focus()

    def on_resize(self) -> None:
        """Show the transcript in the new width."""
        self._show_episode()

    def _show_episode(self) -> None:
        row, log = self._rows[self._place], self.query_one(RichLog)
        title = Text.assemble(cell(row["episode"], 34, "bold"), "  ", outcome(row))
        if row["reward"] is not None:
            title.append(f"  reward {row['reward']:.3f}")
        title.append(f"  step {row['step']} {row['split']}  {self._place + 1}/{len(self._rows)}", style="dim")
        self.query_one("#title", Static).update(title)
        log.clear()
        width = max(self.size.width - 3, 36)  # the padding and the scroll bar
        try:
            # The index may show an episode whose file has been moved since.
            folder = self.app.indexes.runs.folder(self._run_name)  # type: ignore[attr-defined]
            shown = list(_transcript_lines(read_episode_at(folder, row["path"]), config_of(folder), width))
        except (AstunerError, OSError) as error:
            shown = [cell(part, style="red") for part in textwrap.wrap(str(error), width)]
        for line in shown:
            log.write(line)
        self._lines = [line.plain.lower() for line in shown]
        log.scroll_home(animate=False)

    def action_scroll(self, rows: int) -> None:
        """Scroll."""
        self.query_one(RichLog).scroll_relative(y=rows, animate=False)

    def action_end(self, is_last: bool) -> None:
        """Scroll to the first or the last line."""
        log = self.query_one(RichLog)
        if is_last:
            log.scroll_end(animate=False)
        else:
            log.scroll_home(animate=False)

    def action_step(self, episodes: int) -> None:
        """Show another episode of the list."""
        self._place = min(max(self._place + episodes, 0), len(self._rows) - 1)
        self._found = -1
        self._show_episode()

    def action_search(self) -> None:
        """Show the line for the text to search."""
        self.query_one(Input).display = True
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Scroll to the next line that contains the text."""
        text = event.value.strip().lower()
        places = [place for place, line in enumerate(self._lines) if text in line]
        if not text or not places:
            self.notify("no line has this text", severity="warning", markup=False)
            return
        self._found = next((place for place in places if place > self._found), places[0])
        self.query_one(RichLog).scroll_to(y=self._found, animate=False)

    def action_back(self) -> None:
        """Close the search, or return to the episodes."""
        if self.query_one(Input).display:
            self.query_one(Input).display = False
            self.query_one(RichLog).focus()
        else:
            self.app.pop_screen()


def _transcript_lines(recorded: RecordedEpisode, config: Mapping[str, Any], width: int) -> Iterator[Text]:
    """Yield the verdict and the transcript of an episode, as lines of `width` columns."""
    episode = recorded.episode
    verdict = verdict_view(episode, config)
    facts: dict[str, Any] = {f"expected {name}": value for name, value in verdict["expected"].items()}
    facts |= {"answer": verdict["answer"], "judge": verdict["judge"], "advantage": recorded.labels.advantage}
    if episode.judgement is not None:
        components = episode.judgement.components.items()
        facts["reward components"] = ", ".join(f"{name} {value:.3g}" for name, value in components)
        facts["explanation"] = episode.judgement.explanation
    for name, value in facts.items():
        if value not in (None, ""):
            yield cell(f"{name}: {value}", width, "dim")
    yield Text("─" * width, style="dim")
    size = sum(len(str(message)) for call in episode.calls[-1:] for message in call.messages)
    is_folded = size > _FOLDED_SIZE
    if is_folded:
        yield Text("long messages are folded; `astuner explain RUN EPISODE` prints them", style="yellow")
    console = Console(width=width)
    for part in EpisodeTranscript(None, episode, is_folded=is_folded).__rich_console__(console, console.options):
        assert isinstance(part, Text)
        yield part
