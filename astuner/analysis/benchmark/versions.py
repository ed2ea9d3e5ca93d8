"""Versions of astuner, Python, packages and the machine: for recorded runs and for a run that starts now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.installer.env_dir import EnvDir
from astuner.installer.reexec import missing_packages
from astuner.run_record.folder import current_environment
from astuner.run_record.run_facts import environments_of

Versions = Mapping[str, str | list[str]]
"""Version by name; a list if there are several."""

_MACHINE = ("machine", "processor", "cpus")
"""Names that describe the machine. Results of different machines differ only by rounding."""


def recorded_versions(records: Sequence[Path]) -> dict[str, str | list[str]]:
    """Return the versions under which runs were recorded."""
    collected: dict[str, dict[str, None]] = {}
    for folder in records:
        for environment in environments_of(folder):
            for name, value in _versions(environment).items():
                collected.setdefault(name, {})[value] = None
    return {name: next(iter(values)) if len(values) == 1 else [*values] for name, values in collected.items()}


def outdated_versions(record: Path, backbone: str) -> list[str]:
    """Return the versions in a run's record that differ from those for a run that starts now, as `NAME OLD → NEW`.

    Names that the record does not contain are left out, and so is the machine.
    """
    recorded = {name: value for name, value in recorded_versions([record]).items() if name not in _MACHINE}
    now = _current_versions(backbone)
    return changed_versions(recorded, {name: now[name] for name in recorded if name in now}) if now else []


def changed_versions(a: Versions, b: Versions) -> list[str]:
    """Return the versions that differ, as `NAME A → B`."""
    return [
        f"{name} {_text(a.get(name))} → {_text(b.get(name))}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _text(version: str | Iterable[str] | None) -> str:
    return version if isinstance(version, str) else " and ".join(version or ["absent"])


def _current_versions(backbone: str) -> dict[str, str]:
    """Return the versions of a run that starts now; {} if the backbone's own environment is not installed."""
    if not missing_packages(backbone):
        return _versions(current_environment())
    env_dir = EnvDir.of(backbone)
    manifest = env_dir.manifest()
    if manifest is None:
        return {}
    packages = [str(folder) for folder in env_dir.folder.glob("lib/python*/site-packages")]
    return _versions(current_environment(packages) | {"python": manifest.python})


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    git = environment.get("git") or {}
    revision = f"{git['revision'][:12]}{' with changes' if git.get('dirty') else ''}" if git.get("revision") else None
    named = {
        "astuner": environment.get("astuner"),
        "revision": revision,
        "python": environment.get("python"),
        **environment.get("packages", {}),
        "machine": environment.get("machine"),
        "processor": environment.get("processor"),
        "cpus": environment.get("cpus"),
    }
    return {name: str(value) for name, value in named.items() if value is not None}
