"""Tests of the verl backbone."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let verl and Ray warn of what is theirs to mend: each new version of either warns of something else."""
    for item in items:
        if item.get_closest_marker("verl") or item.get_closest_marker("verl_vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
