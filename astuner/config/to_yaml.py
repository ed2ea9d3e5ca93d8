"""Write a configuration as YAML that loads back to the same configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from astuner.config.aliases import WITHOUT_EFFECT
from astuner.config.keys import KeyPath, dotted, is_changed, schema
from astuner.config.nested_dict import without
from astuner.config.root import RunConfig
from astuner.errors import ConfigError
from astuner.redaction import redact_settings

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_REFERENCE = re.compile(r"(\\*)\$\{")


def to_yaml(config: RunConfig, *, redacted: bool = False) -> str:
    """Return the keys with their values as YAML, which `load_config` reads back as `config`.

    Keys that are accepted for older files only are left out at their defaults, because loading them gives a notice.

    Args:
        config: the configuration.
        redacted: whether secrets are replaced with `[redacted]`.

    Raises:
        ConfigError: a value is the text `???`, which means "missing" in Hydra's YAML.
    """
    tree = without(config.model_dump(mode="json"), _left_out(config))
    return yaml.dump(
        _literal(redact_settings(tree) if redacted else tree),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )


def _left_out(config: RunConfig) -> Iterator[KeyPath]:
    for path, key in schema().keys.items():
        noticed = dotted(path) in WITHOUT_EFFECT or any(condition.at_default for condition in key.no_effect)
        if noticed and not is_changed(config, path):
            yield path


class _Dumper(yaml.SafeDumper):
    """Quotes all text except plain words, because YAML readers differ in what they read as numbers or dates."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _represent_text)


def secret_keys(config: RunConfig) -> list[str]:
    """Return the dotted keys whose values `to_yaml` redacts."""

    def differing(value: Any, shown: Any, path: KeyPath) -> Iterator[str]:
        if isinstance(value, dict):
            for name, item, clean in zip(value, value.values(), shown.values(), strict=True):
                yield from differing(item, clean, (*path, str(name)))
        elif value != shown:
            yield dotted(path)

    tree = config.model_dump(mode="json")
    return list(differing(tree, redact_settings(tree), ()))


def _literal(value: Any) -> Any:
    """Escape text that OmegaConf would read as a reference."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if value == "???":
        raise ConfigError("a value is '???', which means a missing value in YAML; set another value")
    if isinstance(value, str):
        # Backslashes have a meaning only before `${`: each is doubled, and one more escapes the reference.
        return _REFERENCE.sub(lambda match: match[1] * 2 + r"\${", value)
    return value
