"""Named breakpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from astuner import bp
from astuner.debugging import breakpoints
from astuner.errors import ConfigError


def test_only_enabled_tags_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(breakpoints, "_active", breakpoints.Breakpoints())
    monkeypatch.setattr(breakpoints, "_reached", set())
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append("stop"))
    bp("A")
    assert not breakpoints.active_breakpoints().tags
    breakpoints.enable_tags("A| C ")
    for tag in ("A", "B", "C"):
        bp(tag)
    assert stops == ["stop", "stop"]
    assert breakpoints.describe_missed_tags() is None
    breakpoints.enable_tags("a|B")
    message = "--db: no line bp('a') was reached; reached were: A, B, C"
    assert breakpoints.describe_missed_tags() == message
    assert breakpoints.active_breakpoints().tags


def test_an_empty_tag_is_an_error():
    with pytest.raises(ConfigError, match="names no tag; write --db=TAG"):
        breakpoints.enable_tags(" | ")


def test_a_loaded_debugger_without_a_client_does_not_count():
    """As in a Jupyter kernel."""
    code = "import debugpy.server.api, sys; from astuner.debugging.breakpoints import is_debugged; "
    code += "print('pydevd' in sys.modules, is_debugged())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_process_under_pdb_is_debugged(tmp_path: Path):
    (tmp_path / "asks.py").write_text(
        "from astuner.debugging.breakpoints import is_debugged\nprint('debugged', is_debugged())\n"
    )
    command = [sys.executable, "-m", "pdb", "asks.py"]
    done = subprocess.run(
        command, cwd=tmp_path, input="next\nnext\nq\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert "debugged True" in done.stdout
