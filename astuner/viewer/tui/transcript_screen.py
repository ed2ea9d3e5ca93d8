"""The transcript of an episode."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input, RichLog, Static

from astuner.errors import AstunerError
from astuner.run_record.episode_file import RecordedEpisode
from astuner.run_record.recorded_run import RecordedRun
from astuner.viewer.episode_view import read_episode_at, verdict_view
from astuner.viewer.transcripts import EpisodeTranscript
from astuner.viewer.tui.lists import cell, outcome

_FOLDED_SIZE = 500_000


class TranscriptScreen(Screen[None]):
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
            shown = list(_transcript_lines(read_episode_at(folder, row["path"]), RecordedRun(folder).config, width))
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
    """Yield an episode's verdict and transcript, as lines of `width` columns."""
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
