"""Write the generated parts of docs/en/configuration.md: `python -m astuner.config.reference docs/en/configuration.md`.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from astuner.config.aliases import ALIASES, WITHOUT_EFFECT, Alias
from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.section import Section
from astuner.config.support import REFUSALS, SCOPES
from astuner.errors import ConfigError

Parts = Mapping[str, Callable[[], str]]

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)

_ALIAS_PLACES = {
    "section": "section",
    "key": "key",
    "bare": "plain text in place of the section",
    "value": "value of `{key}`",
    "module": "beginning of `{key}`",
    "file": "entry of `defaults`",
}


def with_generated_parts(page: str, parts: Parts | None = None) -> str:
    """Return the page's text with every generated part as the code has it today.

    Args:
        page: the text.
        parts: what makes each part, by name; `PARTS` where it is None.

    Raises:
        ConfigError: a part is unknown, or one is missing.
    """
    made_by = PARTS if parts is None else parts
    missing = set(made_by)

    def made_anew(found: re.Match[str]) -> str:
        name = found[2]
        if name not in made_by:
            raise ConfigError(f"there is no generated part {name!r}; there are {', '.join(made_by)}")
        missing.discard(name)
        return f"{found[1]}\n{made_by[name]()}\n{found[3]}"

    text = _PART.sub(made_anew, page)
    if missing:
        name = min(missing)
        raise ConfigError(f"the page has no part {name}; put `<!-- generated: {name} -->` and `<!-- end of {name} -->`")
    return text


def _keys() -> str:
    """Every key: a heading and a table for each section directly below the root and below `astuner`."""
    sections = {path for path in schema().sections if len(path) <= 2}
    loose = [path for path in schema().keys if path[:-1] == ()]
    parts = [
        f"### {dotted(path)}\n\n{table(('key', 'values', 'default', 'meaning'), _rows(path))}"
        for path in sorted(sections - {()}, key=list(schema().sections).index)
    ]
    root = table(("key", "values", "default", "meaning"), (_key_row(path, ()) for path in loose))
    return "\n".join([*parts, f"### Sections of other backbones\n\n{root}"])


def _rows(section: KeyPath, below: KeyPath = ()) -> Iterator[tuple[str, ...]]:
    """The rows of a section's table; a section below `astuner.x` has a row for itself and then its keys."""
    here = (*section, *below)
    for name, field in schema().sections[here].model_fields.items():
        path = (*here, name)
        if path in schema().keys:
            yield _key_row(path, section)
        elif len(section) > 1:
            yield f"**`{dotted(path[len(section) :])}`**", "", "", field.description or ""
            yield from _rows(section, (*below, name))


def _key_row(path: KeyPath, section: KeyPath) -> tuple[str, ...]:
    key = schema().keys[path]
    values = _values(_json_schema(schema().sections[path[:-1]])[path[-1]])
    return f"`{dotted(path[len(section) :])}`", values, f"`{_inline(key.default)}`", key.doc


@cache
def _json_schema(section: type[Section]) -> dict[str, Any]:
    properties: dict[str, Any] = section.model_json_schema()["properties"]
    return properties


def _values(allowed: Mapping[str, Any]) -> str:
    """Say in words what a JSON schema allows."""
    if "anyOf" in allowed:
        return " or ".join(_values(branch) for branch in allowed["anyOf"])
    if "enum" in allowed or "const" in allowed:
        return ", ".join(f"`{choice}`" for choice in allowed.get("enum") or [allowed["const"]])
    if "prefixItems" in allowed:
        return "list: " + "; ".join(_values(item) for item in allowed["prefixItems"])
    if allowed["type"] == "array":
        return f"list of {_values(allowed['items'])}"
    return _KINDS[allowed["type"]] + _bounds(allowed)


_KINDS = {
    "boolean": "true, false",
    "integer": "whole number",
    "null": "null",
    "number": "number",
    "object": "mapping",
    "string": "text",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _bounds(allowed: Mapping[str, Any]) -> str:
    bounds = [f"{sign} {allowed[name]:g}" for name, sign in _BOUNDS.items() if name in allowed]
    return f" {' and '.join(bounds)}" if bounds else ""


def _aliases() -> str:
    rows = [(f"`{alias.old}`", f"`{alias.new}`", _alias_place(alias)) for alias in ALIASES]
    rows += [(f"`{key}`", "nothing", "key") for key in WITHOUT_EFFECT]
    return table(("written", "read as", "where"), rows)


def _alias_place(alias: Alias) -> str:
    return _ALIAS_PLACES[alias.kind].format(key=alias.key)


def _scopes() -> str:
    rows = [
        (", ".join(f"`{key}`" for key in scope.keys), ", ".join(scope.backbones) or "none")
        for scope in sorted(SCOPES, key=lambda scope: len(scope.keys))
    ]
    return table(("keys and sections", "used by"), rows)


def _refusals() -> str:
    rows = [
        (
            f"`{refusal.key}`",
            "anything but the default" if refusal.values is None else ", ".join(map(_code, refusal.values)),
            ", ".join(refusal.backbones),
            refusal.why,
        )
        for refusal in REFUSALS
    ]
    return table(("key or section", "refused", "by", "why, and what to do"), rows)


def _code(value: object) -> str:
    return f"`{_inline(value)}`"


def _inline(value: object) -> str:
    """A value as it may stand in a YAML file, on one line; JSON is YAML."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PARTS: Parts = {
    "aliases": _aliases,
    "scopes": _scopes,
    "refusals": _refusals,
    "keys": _keys,
}


def main(arguments: Sequence[str] | None = None, parts: Parts | None = None) -> None:
    """Write the generated parts of the pages that the command line names."""
    for name in sys.argv[1:] if arguments is None else arguments:
        page = Path(name)
        page.write_text(with_generated_parts(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
