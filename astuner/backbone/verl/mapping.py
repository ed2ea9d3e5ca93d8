"""mapping.yaml and machine.yaml of `default_config/verl`, read."""

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
        everywhere: verl key to value.
        without_flash_attention: the same, where flash-attention does not import, as on every CPU.
        cpu: the same, on a CPU.
        own_ray: the same, on a CPU where Ray is started for the run.
        own_ray_facts: verl key to rule, on a CPU where Ray is started for the run.
    """

    everywhere: Mapping[str, object]
    without_flash_attention: Mapping[str, object]
    cpu: Mapping[str, object]
    own_ray: Mapping[str, object]
    own_ray_facts: Mapping[str, str]


@cache
def verl_mapping() -> KeyMapping:
    """mapping.yaml as shipped."""
    return read_mapping("verl")


@cache
def machine_mapping() -> MachineMapping:
    """machine.yaml as shipped."""
    return MachineMapping(**read_yaml(SHIPPED_FOLDER / "verl" / "machine.yaml").tree)
