"""The base class for screens with a list, and the texts in their cells."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from astuner.errors import AstunerError
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction.redactor import redact

if TYPE_CHECKING:
    from astuner.viewer.tui.screens import TerminalViewer

_REFRESH_SECONDS = 2.0
STATE_STYLES = {"running": "cyan", "finished": "green", "failed": "bold red", "unreadable": "bold red"}


def cell(text: object, width: int = 0, style: str = "") -> Text:
    """Return a text of a record on one line, cut to `width`, with control characters visible and without markup."""
    shown = redact("" if text is None else str(text)[:2000]).replace("\n", "␊").replace("\t", "␉")
    line = Text(escape_control_characters(shown), style=style, no_wrap=True, overflow="ellipsis", end="")
    if width:
        line.truncate(width, overflow="ellipsis")
    return line


def outcome(row: dict[str, Any]) -> Text:
    """Return whether an episode succeeded, or its status."""
    if row["status"] != "ok":
        return cell(row["status"], style="red")
    if row["is_success"] is None:
        return Text("ok")
    return Text("solved", style="green") if row["is_success"] else Text("not solved", style="yellow")


@dataclass(frozen=True)
class Listing:
    """A list's content: a line above the `head`, and rows with a key each, which may be the first of `total`."""

    title: Text
    head: Text
    rows: Sequence[tuple[str, Sequence[Text]]]
    total: int


class ListScreen(Screen[None]):
    """A list with a cursor. It is read in a thread, and read again every two seconds."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move(1)", "down", show=False),
        Binding("k", "move(-1)", "up", show=False),
        Binding("g", "end(False)", "first", show=False),
        Binding("G", "end(True)", "last", show=False),
        Binding("escape", "back", "back"),
        Binding("slash", "search", "search"),
    ]
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    SEARCH: ClassVar[str] = "text"

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._is_reading = False
        self._is_stale = False
        self._shown: Listing | None = None
        self._keys: list[str] = []

    @property
    def viewer(self) -> TerminalViewer:
        """The application."""
        return cast("TerminalViewer", self.app)

    def read(self) -> Listing:
        """Read the list. Called in a thread.

        Raises:
            AstunerError, sqlite3.Error, OSError: the record cannot be read.
        """
        raise NotImplementedError

    def open(self, key: str) -> None:
        """Open the row with this key."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static("loading …", id="title")
        with VerticalScroll(id="head", can_focus=False):
            yield Static(id="lines")
        table: DataTable[Text] = DataTable(cursor_type="row")
        table.add_columns(*self.COLUMNS)
        yield table
        yield Input(placeholder=self.SEARCH, id="search")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Read the list."""
        self.query_one(Input).display = False
        self.table.focus()
        self.reload()
        self.set_interval(_REFRESH_SECONDS, self.poll)

    def on_resize(self) -> None:
        """Fit the cells to the new width."""
        self.reload()

    @property
    def table(self) -> DataTable[Text]:
        """The table."""
        return cast("DataTable[Text]", self.query_one(DataTable))

    def poll(self) -> None:
        """Read the list again if it is visible."""
        if self.is_current:
            self.reload()

    def reload(self) -> None:
        """Read the list in a thread. A call while it is read reads it once more afterwards."""
        if self._is_reading:
            self._is_stale = True
            return
        self._is_reading = True
        self._read_in_thread()

    @work(thread=True, exit_on_error=True)
    def _read_in_thread(self) -> None:
        listing: Listing | str
        try:
            listing = self.read()
        except (AstunerError, sqlite3.Error, OSError) as error:
            listing = str(error)
        self.app.call_from_thread(self._end_reading, listing)

    def _end_reading(self, listing: Listing | str) -> None:
        self._is_reading = False
        if not self.is_attached:
            return
        if isinstance(listing, str):
            self.query_one("#title", Static).update(cell(listing, style="bold red"))
        elif listing != self._shown:
            self._show_listing(listing)
        if self._is_stale:
            self._is_stale = False
            self.reload()

    def _show_listing(self, listing: Listing) -> None:
        table, before = self.table, self._keys
        key = before[table.cursor_row] if table.cursor_row < len(before) else None
        self.query_one("#title", Static).update(listing.title)
        self.query_one("#lines", Static).update(listing.head)
        self.query_one("#head").display = bool(listing.head)
        if self._shown is None or listing.rows != self._shown.rows:
            keys = [row_key for row_key, _ in listing.rows]
            is_longer = bool(before) and keys[: len(before)] == before and self._shown is not None
            is_longer = is_longer and list(listing.rows[: len(before)]) == list(self._shown.rows if self._shown else ())
            if not is_longer:
                table.clear()
            for row_key, cells in listing.rows[len(before) if is_longer else 0 :]:
                table.add_row(*cells, key=row_key)
            self._keys = keys
            if not is_longer and key in keys:
                table.move_cursor(row=keys.index(key), animate=False)
        self._shown = listing

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the row."""
        if event.row_key.value is not None:
            self.open(event.row_key.value)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Read further rows if the cursor is near the last one."""
        if self._shown is not None and event.cursor_row >= len(self._keys) - 20 and len(self._keys) < self._shown.total:
            self.extend()

    def extend(self) -> None:
        """Read further rows; a list that is always complete has none."""

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self.table.move_cursor(row=self.table.cursor_row + rows)

    def action_end(self, is_last: bool) -> None:
        """Move the cursor to the first or the last row that has been read."""
        self.table.move_cursor(row=len(self._keys) - 1 if is_last else 0)

    def action_back(self) -> None:
        """Close the search, or return to the screen before."""
        search = self.query_one(Input)
        if search.display:
            search.display = False
            self.table.focus()
        elif self.text:
            self._search_for("")
        elif len(self.app.screen_stack) > self.viewer.first_screens:
            self.app.pop_screen()

    def action_search(self) -> None:
        """Show the line for the text to search."""
        search = self.query_one(Input)
        search.value = self.text
        search.display = True
        search.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search for the text."""
        self.query_one(Input).display = False
        self.table.focus()
        self._search_for(event.value.strip())

    def _search_for(self, text: str) -> None:
        self.text = text
        self.reload()


def lines(parts: Iterator[Text] | Sequence[Text]) -> Text:
    """Return lines as one text."""
    return Text("\n").join(parts)


def search_state(search: Mapping[str, Any] | None) -> Text:
    """Return why a search may lack episodes; empty if it is complete."""
    if search is None or (search["done"] and not search["error"]):
        return Text()
    if search["error"]:
        return Text.assemble("  ", cell(search["error"], style="yellow"))
    return Text(f"  {search['indexed']:,} of {search['episodes']:,} searched so far", style="yellow")


def resampled(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` means of consecutive values."""
    if len(values) <= width:
        return list(values)
    bounds = [round(index * len(values) / width) for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
