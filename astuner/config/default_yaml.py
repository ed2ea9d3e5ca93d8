"""Generate `default_config/astuner_default.yaml` from the schema: `python -m astuner.config.default_yaml`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import yaml

from astuner.config.keys import Key, KeyPath, schema
from astuner.config.root import RunConfig
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.section import Section

DEFAULT_YAML = SHIPPED_FOLDER / "astuner_default.yaml"
_WIDTH = 110
_HEADER = """\
# Every key of astuner with its default value, loaded before your own YAML file.
# Generated from the schema by `python -m astuner.config.default_yaml`; edit the schema, not this file.
"""


def default_yaml() -> str:
    """The text of the file: section `astuner`, each key under its documentation."""
    return "\n".join([_HEADER, *_section(("astuner",), RunConfig.model_fields["astuner"].description or ""), ""])


def _section(path: KeyPath, doc: str) -> Iterator[str]:
    section: type[Section] = schema().sections[path]
    yield from _comment(path, doc)
    yield f"{_indent(path)}{path[-1]}:"
    after_section = False
    for name, field in section.model_fields.items():
        child = (*path, name)
        is_section = child in schema().sections
        if is_section or after_section:
            yield ""
        after_section = is_section
        if is_section:
            yield from _section(child, field.description or "")
        else:
            yield from _key(schema().keys[child])


def _key(key: Key) -> Iterator[str]:
    yield from _comment(key.path, key.doc)
    yield f"{_indent(key.path)}{key.path[-1]}: {_inline(key.default)}"


def _inline(value: object) -> str:
    """The value as YAML on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("...\n").strip()


def _comment(path: KeyPath, doc: str) -> Iterator[str]:
    margin = f"{_indent(path)}# "
    yield from textwrap.wrap(doc, _WIDTH, initial_indent=margin, subsequent_indent=margin)


def _indent(path: KeyPath) -> str:
    return "  " * (len(path) - 1)


def main() -> None:
    """Write the file."""
    DEFAULT_YAML.write_text(default_yaml(), encoding="utf-8")


if __name__ == "__main__":
    main()
