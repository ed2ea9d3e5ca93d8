"""mapping.yaml and machine.yaml of `default_config/trinity`, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from astuner.backbone.key_mapping import KeyMapping, read_mapping
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.yaml_file import read_yaml


@dataclass(frozen=True, slots=True)
class MachineMapping:
    """machine.yaml.

    Attributes:
        everywhere: Trinity key to value.
        tinker: the same, where a Tinker server samples and trains.
        tinker_facts: Trinity key to rule, there.
        gpus: Trinity key to value, where vLLM samples and verl's workers train.
    """

    everywhere: Mapping[str, object]
    tinker: Mapping[str, object]
    tinker_facts: Mapping[str, str]
    gpus: Mapping[str, object]


@cache
def trinity_mapping() -> KeyMapping:
    """mapping.yaml as shipped."""
    return read_mapping("trinity")


@cache
def machine_mapping() -> MachineMapping:
    """machine.yaml as shipped."""
    return MachineMapping(**read_yaml(SHIPPED_FOLDER / "trinity" / "machine.yaml").tree)
