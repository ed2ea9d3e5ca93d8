"""Tests of the trinity backbone."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Trinity and Ray warn of what is theirs to mend: each new version of either warns of something else."""
    for item in items:
        if item.get_closest_marker("trinity"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
