"""Tests of the verl backbone."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings in tests with verl and Ray: they differ from version to version, and are theirs to fix."""
    for item in items:
        if item.get_closest_marker("verl") or item.get_closest_marker("verl_vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
