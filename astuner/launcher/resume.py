"""The decision whether a run resumes an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml
from loguru import logger

from astuner.backbone.training.checkpoints import complete_checkpoints, damaged_checkpoints
from astuner.config.resume import KeyChange, Locations, changed_keys
from astuner.run_record.run_facts import search_folders_of
from astuner.system.redaction import redact_settings


def can_resume(folder: Path, config_yaml: str, config_dir: Path) -> bool:
    """Return whether a run resumes the earlier run in `folder`. The log reports the reason and the changed keys.

    A run resumes if the earlier run has a complete checkpoint, is unfinished or now has more steps, and differs only in
    keys on which neither samples nor updates depend.

    Args:
        folder: the folder of the run record.
        config_yaml: the configuration of this run, in the format of the record.
        config_dir: the folder of this run's YAML file.
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
    """Return the keys in which a configuration differs from that of the run in `folder`; None if it cannot be read.

    Args:
        folder: the folder of the run record.
        config_yaml: the configuration, in the format of the record.
        config_dir: the folder of its YAML file.
    """
    earlier = _read_mapping(folder / "config.yaml")
    return _changes(folder, earlier, config_yaml, config_dir) if earlier else None


def _changes(folder: Path, earlier: dict[str, Any], config_yaml: str, config_dir: Path) -> list[KeyChange]:
    here = (Path.cwd(), config_dir)
    locations = Locations(search_folders_of(folder) or here, here)
    # Both are redacted with the current rules, because an earlier version may have redacted less.
    earlier = cast(dict[str, Any], redact_settings(earlier))
    return changed_keys(earlier, cast(dict[str, Any], redact_settings(yaml.safe_load(config_yaml))), locations)


def _read_mapping(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file; empty if the file cannot be read or is not a mapping."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    # AttributeError: PyYAML raises it for an invalid date.
    except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}
