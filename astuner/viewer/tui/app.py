"""The application of `astuner view --tui`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Center
from textual.screen import ModalScreen
from textual.widgets import Static

from astuner.viewer.runs import IndexCache, RunList, Runs
from astuner.viewer.tui.run_screen import RunScreen
from astuner.viewer.tui.runs_screen import RunsScreen

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
        folder: the folder of a run, or a folder of runs.
        indexes: the indexes of the runs.
        run_list: the list of the runs.
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
        """Create the application.

        Args:
            folder: the folder of a run, or a folder of runs.
            cache: folder of the databases of the indexes; None for that of the user.

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
