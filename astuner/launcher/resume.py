"""The decision whether a run resumes an earlier run, from the keys in which their configurations differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from loguru import logger

from astuner.backbone.training.checkpoints import complete_checkpoints, damaged_checkpoints
from astuner.config.keys import dotted, get_at, schema
from astuner.config.section import ResumeRule
from astuner.run_record.recorded_run import search_folders_of
from astuner.system.redaction.redactor import redact_settings

_REDACTED = "[redacted]"


def can_resume(folder: Path, config_yaml: str, config_dir: Path) -> bool:
    """Return whether a run resumes the earlier run in `folder`. The log reports the reason and the changed keys.

    A run resumes if the earlier run has a complete checkpoint, is unfinished or now has more steps, and differs only in
    keys on which neither samples nor updates depend.

    Args:
        config_yaml: the configuration of this run, in the format of the record.
    """
    checkpoints = folder / "checkpoints"
    # A run that has only damaged checkpoints also counts as resumable, because loading them reports the damage.
    if not complete_checkpoints(checkpoints) and not damaged_checkpoints(checkpoints):
        return False
    is_finished = (folder / "summary.json").exists()
    earlier = _read_mapping(folder / "config.yaml")
    if not earlier:
        if not is_finished:
            logger.warning(
                "{} has an unfinished run whose config.yaml is missing or damaged, so it cannot be resumed; starting "
                "from scratch. The earlier record is kept",
                folder,
            )
        return False
    changes = _changes(folder, earlier, config_yaml, config_dir)
    if is_finished and not any(change.rule == "more" and change.allowed for change in changes):
        return False
    forbidden = [change for change in changes if not change.allowed]
    if forbidden:
        logger.warning(
            "{} has a{} run with another configuration; starting from scratch. The earlier record is kept. These keys "
            "differ:\n{}\nTo resume the earlier run, restore these values; to keep both runs under their own names, "
            "change experiment_name or --exp-dir",
            folder,
            " finished" if is_finished else "n unfinished",
            "\n".join(f"  {change}" for change in forbidden),
        )
        return False
    if changes:
        logger.info("resuming {} with changed keys: {}", folder, "; ".join(map(str, changes)))
    return True


def recorded_changes(folder: Path, config_yaml: str, config_dir: Path) -> list[KeyChange] | None:
    """Return the keys in which a configuration, as recorded, differs from the run's in `folder`; None if unreadable."""
    earlier = _read_mapping(folder / "config.yaml")
    return _changes(folder, earlier, config_yaml, config_dir) if earlier else None


def _changes(folder: Path, earlier: dict[str, Any], config_yaml: str, config_dir: Path) -> list[KeyChange]:
    here = (Path.cwd(), config_dir)
    locations = Locations(search_folders_of(folder) or here, here)
    # Both are redacted with the current rules, because an earlier version may have redacted less.
    earlier = cast(dict[str, Any], redact_settings(earlier))
    return changed_keys(earlier, cast(dict[str, Any], redact_settings(yaml.safe_load(config_yaml))), locations)


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    # AttributeError: PyYAML raises it for an invalid date.
    except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


@dataclass(frozen=True)
class KeyChange:
    """A key whose value differs from that of the earlier run.

    Attributes:
        key: the dotted key.
        earlier, now: the two values.
        rule: how the key may differ.
        allowed: whether the new value follows the rule.
    """

    key: str
    earlier: object
    now: object
    rule: ResumeRule
    allowed: bool

    def __str__(self) -> str:
        note = " (it may only become larger)" if self.rule == "more" and not self.allowed else ""
        return f"{self.key}: {self.earlier!r} → {self.now!r}{note}"


@dataclass(frozen=True)
class Locations:
    """The folders in which relative paths of the two runs are searched.

    Attributes:
        earlier: those of the earlier run.
        now: those of this run.
    """

    earlier: Sequence[Path]
    now: Sequence[Path]


def changed_keys(earlier: Mapping[str, Any], now: Mapping[str, Any], locations: Locations) -> list[KeyChange]:
    """Return the keys whose values differ, in the order of the schema.

    A key that the earlier configuration lacks had its default value then. Values that contain a redacted secret cannot
    be compared and count as equal.

    Args:
        earlier, now: the content of the two `config.yaml`.
        locations: for keys that name files.
    """
    changes = []
    for path, key in schema().keys.items():
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        before, after = get_at(earlier, path, default), get_at(now, path, default)
        for name, old, new in _differences(dotted(path), before, after):
            rule = key.resume or "same"
            if rule == "path" and _name_one_file(old, new, locations):
                continue
            allowed = rule == "any" or (rule == "more" and _limit(new) >= _limit(old))
            changes.append(KeyChange(name, old, new, rule, allowed))
    return changes


def _differences(name: str, before: object, after: object) -> Iterator[tuple[str, object, object]]:
    """Yield the name and the values of each part that differs; the parts of a mapping are compared one by one."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(f"{name}.{key}", before.get(key), after.get(key))
    # True and 1 are equal in Python. 1 and 1.0 are one value of a key.
    elif (isinstance(before, bool) is not isinstance(after, bool) or before != after) and _REDACTED not in str(before):
        yield name, before, after


def _limit(value: object) -> float:
    """Return a maximum as a number; null means no maximum."""
    return float(value) if isinstance(value, int | float) else math.inf


def _name_one_file(before: object, after: object, locations: Locations) -> bool:
    """Return whether two values name the same file or folder, which may have been moved, alone or with its project."""
    if not (isinstance(before, str) and isinstance(after, str)):
        return False
    old_file, _, old_name = before.partition("->")
    new_file, _, new_name = after.partition("->")
    if old_name != new_name or not old_file or not new_file:
        return False
    old_places = [(_absolute(folder, old_file), folder) for folder in (*locations.earlier, *locations.now)]
    new_places = [(_absolute(folder, new_file), folder) for folder in locations.now]
    if {place.resolve() for place, _ in old_places} & {place.resolve() for place, _ in new_places}:
        return True
    inside_old, inside_new = (
        {place.relative_to(folder) for place, folder in places if place.is_relative_to(folder)}
        for places in (old_places, new_places)
    )
    if inside_old & inside_new:
        return True
    is_moved = any(place.exists() for place, _ in new_places) and not any(place.exists() for place, _ in old_places)
    return is_moved and Path(old_file).name == Path(new_file).name


def _absolute(folder: Path, file: str) -> Path:
    return Path(os.path.normpath(folder.absolute() / Path(file).expanduser()))
