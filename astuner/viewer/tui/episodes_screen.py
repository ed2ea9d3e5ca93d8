"""The episodes of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from astuner.viewer.episode_search import find_episodes
from astuner.viewer.queries import EpisodeFilter, Order
from astuner.viewer.tui.lists import Listing, ListScreen, cell, count, number, outcome, search_state
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
    return [
        Text(str(row["step"]), justify="right"),
        cell(row["split"], 5),
        number(row["reward"]),
        outcome(row),
        _ends(row["query"] or row["task"], width),
        cell(text, width, "red" if is_failed else ""),
    ]


def _ends(text: str, width: int) -> Text:
    """Return a text's beginning and end, because the questions of many tasks begin alike."""
    line = cell(text)
    if line.cell_len <= width:
        return line
    head, tail = line.copy(), line.plain[-(width // 2) :]
    head.truncate(width - len(tail) - 1)
    return head.append(f"…{tail}")
