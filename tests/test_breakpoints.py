"""Breakpoints with names."""

from __future__ import annotations

import sys

import pytest

from astuner import bp, breakpoints
from astuner.errors import ConfigError


def test_only_chosen_tags_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(breakpoints, "_chosen", frozenset())
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append("stop"))
    bp("A")
    assert not breakpoints.any_chosen()
    breakpoints.choose_tags("A| C ")
    for tag in ("A", "B", "C"):
        bp(tag)
    assert stops == ["stop", "stop"]
    assert breakpoints.any_chosen()


def test_a_choice_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="names no tag; write --db=TAG"):
        breakpoints.choose_tags(" | ")
