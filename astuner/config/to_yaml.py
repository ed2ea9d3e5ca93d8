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
from astuner.system.redaction import redact_settings

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_REFERENCE = re.compile(r"(\\*)\$\{")


def to_yaml(config: RunConfig, *, redacted: bool = False, full: bool = True) -> str:
    """Return the keys with their values as YAML, which `load_config` reads back as `config`.

    Keys that are accepted for older files only are left out at their defaults, because loading them gives a notice.

    Args:
        config: the configuration.
        redacted: whether secrets are replaced with `[redacted]`.
        full: whether keys at their defaults are written.

    Raises:
        ConfigError: a value is the text `???`, which means "missing" in Hydra's YAML.
    """
    tree = without(config.model_dump(mode="json"), _left_out(config, full=full))
    if not full:
        tree = _without_empty_sections(tree)
    return yaml.dump(
        _literal(redact_settings(tree) if redacted else tree),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )


def _without_empty_sections(tree: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """Return the tree without the sections of the schema that have no key left; a mapping that is a value stays."""
    kept = {}
    for name, value in tree.items():
        here = (*path, name)
        is_section = isinstance(value, dict) and here not in schema().keys
        content = _without_empty_sections(value, here) if is_section else value
        if content or not is_section:
            kept[name] = content
    return kept


def _left_out(config: RunConfig, *, full: bool) -> Iterator[KeyPath]:
    for path, key in schema().keys.items():
        if not full and not is_changed(config, path):
            yield path
            continue
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
