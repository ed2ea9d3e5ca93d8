"""Breakpoints with names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from astuner import bp, breakpoints
from astuner.errors import ConfigError


def test_only_chosen_tags_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(breakpoints, "_chosen", breakpoints.Breakpoints())
    monkeypatch.setattr(breakpoints, "_reached", set())
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append("stop"))
    bp("A")
    assert not breakpoints.any_chosen()
    breakpoints.choose_tags("A| C ")
    for tag in ("A", "B", "C"):
        bp(tag)
    assert stops == ["stop", "stop"]
    assert breakpoints.why_nothing_stopped() is None
    breakpoints.choose_tags("a|B")
    said = "--db: no line bp('a') was reached; reached were: A, B, C"
    assert breakpoints.why_nothing_stopped() == said
    assert breakpoints.any_chosen()


def test_a_choice_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="names no tag; write --db=TAG"):
        breakpoints.choose_tags(" | ")


def test_a_loaded_debugger_that_nobody_is_attached_to_is_none():
    """As in a Jupyter kernel."""
    code = "import debugpy.server.api, sys; from astuner.breakpoints import is_debugged; "
    code += "print('pydevd' in sys.modules, is_debugged())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_process_under_pdb_is_debugged(tmp_path: Path):
    (tmp_path / "asks.py").write_text("from astuner.breakpoints import is_debugged\nprint('debugged', is_debugged())\n")
    command = [sys.executable, "-m", "pdb", "asks.py"]
    done = subprocess.run(
        command, cwd=tmp_path, input="next\nnext\nq\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert "debugged True" in done.stdout
