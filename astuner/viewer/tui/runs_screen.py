"""The list of runs in a folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from astuner.run_record.console_lines import spark_line
from astuner.viewer.tui.lists import STATE_STYLES, Listing, ListScreen, cell, count, resampled
from astuner.viewer.tui.run_screen import RunScreen


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
        Text(f"{spark_line(resampled(rewards, 6), 6)} {rewards[-1]:.2f}" if rewards else "-"),
        Text("-" if rates == ["?", "?"] else rates[1] if rates[0] == "?" else " → ".join(rates)),
        Text(str(row["counts"]["failed"]), style="red" if row["counts"]["failed"] else "dim", justify="right"),
        Text(started),
    ]
