"""`astuner view --tui`: a viewer of recorded runs in the terminal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from astuner.errors import ConfigError


def show_in_terminal(folder: Path) -> None:
    """Show a run, or the runs in a folder, in the terminal until the user quits.

    Raises:
        ConfigError: textual is not installed, or the command has no terminal.
        RecordError: there is no such folder.
    """
    if importlib.util.find_spec("textual") is None:
        raise ConfigError('`astuner view --tui` needs textual, which is not installed; run: pip install "astuner[tui]"')
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "`astuner view --tui` needs a terminal, and its input or output is a file or a pipe; run it in a terminal, "
            "with `ssh -t` over ssh, or print results with `astuner runs` and `astuner explain`"
        )
    from astuner.viewer.tui.screens import TerminalViewer

    TerminalViewer(folder).run()
