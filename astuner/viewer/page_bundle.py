"""The page's modules as one classic script, because browsers do not load modules from files (`file://`)."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

STATIC = Path(__file__).parent / "static"
_COMMENT = re.compile(r"^/\*.*?\*/$", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^import (?:(?P<default>\w+)|\{(?P<names>[^}]*)\}) from \"(?P<module>[^\"]+)\";$", re.MULTILINE)
_DYNAMIC_IMPORT = re.compile(r"\bimport\(\"([^\"]+)\"\)")
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_EXPORT_DEFAULT = re.compile(r"^export \{ (\w+) as default \};$", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
_LOADER = """
const loaded = {};
const load = (name) => {
  if (!(name in loaded)) { loaded[name] = {}; modules[name](loaded[name]); }
  return loaded[name];
};
"""


def bundle(entry: str, start: str = "") -> str:
    """Return a script with a module of the page and all modules that it imports.

    Args:
        entry: Path of the module below the static files, such as `js/app.js`.
        start: Code to run after the module, which finds the names that the module exports in `exported`.

    Raises:
        ValueError: If a module has an import or an export of another form than those of the page's modules.
    """
    sources: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name], imported = _as_function(name)
            waiting += imported
    modules = ",\n".join(f"{json.dumps(name)}: (exported) => {{\n{source}\n}}" for name, source in sources.items())
    return (
        f'(() => {{\n"use strict";\nconst modules = {{\n{modules}\n}};{_LOADER}'
        f"const exported = load({json.dumps(entry)});\n{start}\n}})();\n"
    )


def _as_function(name: str) -> tuple[str, list[str]]:
    """Return the body of a function that runs a module, and the modules that it imports."""
    source = _COMMENT.sub("", (STATIC / name).read_text(encoding="utf-8"))
    imported: list[str] = []

    def path_of(relative: str) -> str:
        parts: list[str] = []
        for part in (PurePosixPath(name).parent / relative).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        imported.append("/".join(parts))
        return json.dumps(imported[-1])

    def static_import(match: re.Match[str]) -> str:
        names = f"default: {match['default']}" if match["default"] else match["names"].replace(" as ", ": ")
        return f"const {{ {names.strip()} }} = load({path_of(match['module'])});"

    names: list[str] = []
    source = _IMPORT.sub(static_import, source)
    source = _DYNAMIC_IMPORT.sub(lambda match: f"Promise.resolve(load({path_of(match[1])}))", source)
    source = _EXPORT.sub(lambda match: names.append(match[1]) or "", source)  # type: ignore[func-returns-value]
    source = _EXPORT_DEFAULT.sub(lambda match: f"exported.default = {match[1]};", source)
    if left := _LEFT.search(source):
        raise ValueError(f"{name}: this form of import or export cannot be bundled: {left[0]!r}")
    return f"{source}\nObject.assign(exported, {{ {', '.join(names)} }});", imported
