"""The package as a whole: light to import, everything public reachable."""

from __future__ import annotations

import subprocess
import sys

import pytest

import astuner

HEAVY = ("torch", "transformers", "datasets", "agentscope", "ray", "verl", "trinity", "vllm", "renderers")


@pytest.mark.parametrize("command", ["import astuner", "import astuner.cli"])
def test_import_is_light(command: str):
    code = f"import sys; {command}; print([name for name in {HEAVY!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert printed.stdout.strip() == "[]"


def test_public_names_are_there():
    for name in astuner.__all__:
        assert getattr(astuner, name).__name__ == name
    assert set(astuner.__all__) <= set(dir(astuner))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        astuner.Nothing  # noqa: B018
