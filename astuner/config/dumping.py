"""Write a configuration as YAML that loads back to the same configuration."""

from __future__ import annotations

import re
from typing import Any

import yaml

from astuner.config.root import RunConfig
from astuner.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_REFERENCE = re.compile(r"(\\*)\$\{")


def to_yaml(config: RunConfig) -> str:
    """Every key with its value, as YAML; `load_config` of it gives back `config`.

    Raises:
        ConfigError: a value is the text `???`, which YAML files of Hydra use for "still to be given".
    """
    tree = _literal(config.model_dump(mode="json"))
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around all text but plain words: readers differ in what else they take for a number or a date."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _represent_text)


def _literal(value: Any) -> Any:
    """Escape what OmegaConf would take for a reference."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if value == "???":
        raise ConfigError("the text '???' stands for a value still to be given; it cannot be written to a YAML file")
    if isinstance(value, str):
        # Backslashes count only before `${`: there each is doubled, and one more escapes the reference.
        return _REFERENCE.sub(lambda match: match[1] * 2 + r"\${", value)
    return value
