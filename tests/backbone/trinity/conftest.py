"""Configuration of the trinity backbone's tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of Trinity and Ray, which vary between their versions."""
    for item in items:
        if item.get_closest_marker("trinity"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
