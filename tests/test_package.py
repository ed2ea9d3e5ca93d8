"""The package as a whole: light to import, everything public reachable."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import astuner
from astuner.installer.env_specs import ENV_SPECS, EnvSpec
from astuner.installer.inspection import unmet

ROOT = Path(__file__).parents[1]

HEAVY = ("torch", "transformers", "datasets", "agentscope", "ray", "verl", "trinity", "vllm", "renderers")


@pytest.mark.parametrize("command", ["import astuner", "import astuner.cli"])
def test_import_is_light(command: str):
    code = f"import sys; {command}; print([name for name in {HEAVY!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert printed.stdout.strip() == "[]"


def test_python_without_docstrings_is_refused():
    code = "from astuner.launcher.launch import prepare_process; prepare_process()"
    ended = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "ConfigError: python runs with -OO, but Transformers reads docstrings; use -O" in ended.stderr


def test_public_names_are_there():
    for name in astuner.__all__:
        assert getattr(astuner, name).__name__ == name
    assert set(astuner.__all__) <= set(dir(astuner))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        astuner.Nothing  # noqa: B018


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}


def constraints() -> dict[str, str]:
    """The versions of constraints.txt by package."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("extra", EXTRAS)
def test_constraints_meet_the_requirements_of_each_extra(extra: str):
    versions = constraints()
    pinned = [line for line in EXTRAS[extra] if canonicalize_name(Requirement(line).name) in versions]
    assert unmet(pinned, versions.get) == []


@pytest.mark.parametrize("spec", ENV_SPECS, ids=lambda spec: spec.name)
def test_an_extra_installs_the_versions_of_its_environments(spec: EnvSpec):
    locked, versions = {canonicalize_name(name): version for name, version in spec.pins.items()}, constraints()
    assert unmet(EXTRAS[spec.backbone], locked.get) == []
    names = [canonicalize_name(Requirement(line).name) for line in EXTRAS[spec.backbone]]
    assert [versions.get(name) for name in names] == [locked[name] for name in names]
