"""Fixtures of the configuration tests: a minimal YAML file, and a function that writes YAML files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
astuner:
  model: {path: some/model}
  rollout:
    agentscope_workflow: flow->Flow
"""


@pytest.fixture
def minimal() -> str:
    """Four lines that load; tests append lines from line 5 on."""
    return MINIMAL


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write `run.yaml`, and further files by name (`base`, `folder/name`), into one folder; return run.yaml."""

    def _write(text: str, files: dict[str, str] | None = None) -> Path:
        for name, content in {"run": text, **(files or {})}.items():
            path = tmp_path / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return tmp_path / "run.yaml"

    return _write
