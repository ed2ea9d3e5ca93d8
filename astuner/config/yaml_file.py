"""Reads a YAML file as a tree of values, with each key's line."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedValueType

from astuner.config.keys import KeyPath
from astuner.errors import ConfigError, did_you_mean
from astuner.system.redaction import learn_secret_settings

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "default_config"
SUFFIXES = (".yaml", ".yml")
MAX_DIGITS = 4000
"""Digits of a number; Python converts at most 4,300."""
_MAX_VALUES = 100_000


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A file as read, with references unresolved.

    Attributes:
        path: the file.
        text: its content.
        tree: its values, as OmegaConf reads them and not YAML 1.1: `1e-6` is a float, and a date is text.
        lines: 1-based line of every key and list item; the last part of an item's path is its index.
    """

    path: Path
    text: str
    tree: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """Return a key's `file:line`, or that of the nearest section around it that the file contains."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return place(self.path, self.lines[path[:end]])
        return shown(self.path)


def shown(path: Path) -> str:
    """Return the path as errors show it: relative if it is in the working directory."""
    absolute = Path(os.path.abspath(path))
    cwd = Path.cwd()
    return str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute)


def place(path: Path, line: int) -> str:
    """Return `file:line`."""
    return f"{shown(path)}:{line}"


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML file whose top level is a mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: the file does not exist, is not text or a mapping, or has a syntax error (with line and column).
    """
    text = _text(path)
    lines: dict[KeyPath, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return YamlFile(path, text, {}, {})
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{place(path, 1)}: expected `key: value` lines, starting with `astuner:`")
        _collect_lines(yaml.SafeLoader(""), root, (), lines)
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except _InvalidNode as error:
        raise ConfigError(f"{place(path, error.args[1])}: {error.args[0]}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(path, text, error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{shown(path)}: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_interpolation_error(path, lines, error)) from error
    except RecursionError:
        reason = "an anchor (&…) contains itself, or the values are nested too deeply"
        raise ConfigError(f"{shown(path)}: {reason}") from None
    except ValueError as error:  # `!!float x`
        raise ConfigError(f"{shown(path)}: not valid YAML: {error}") from error
    assert isinstance(tree, dict)
    learn_secret_settings(tree)
    return YamlFile(path, text, {str(key): value for key, value in tree.items()}, lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(_missing_file(path)) from None
    except IsADirectoryError:
        raise ConfigError(_folder_instead(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be read: {error.strerror}") from None


def _folder_instead(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
    hint = f"; did you mean {' or '.join(shown(path / name) for name in names[:3])}?" if names else ""
    return f"{shown(path)} is a folder; expected a YAML file{hint}"


def _missing_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"no file {shown(path)}: there is no folder {shown(folder)}"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)
    hint = did_you_mean(path.name, names, "; did you mean {}?", show=lambda name: shown(folder / name), cutoff=0.5)
    return f"no file {shown(path)}{hint}"


def _syntax_error(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    if path.suffix == ".py":
        return f"{shown(path)} is a Python file; --conf expects a YAML file that names it (agentscope_workflow)"
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{shown(path)}: not valid YAML: {error.problem}"
    where = f"{place(path, mark.line + 1)}, column {mark.column + 1}"
    if (reason := _layout_problem(text.splitlines(), mark.line, error)) is None:
        reason = f"not valid YAML: {', '.join(part for part in (error.context, error.problem) if part)}"
    return f"{where}: {reason}"


def _layout_problem(lines: list[str], number: int, error: yaml.MarkedYAMLError) -> str | None:
    """Return what is wrong with the indentation or with a repeated key; None if it is something else.

    Args:
        lines: the file.
        number: 0-based line of the error.
        error: the error of PyYAML.
    """
    problem, line = error.problem or "", lines[number] if number < len(lines) else ""
    if "found duplicate key" in problem:
        return f"{problem.removeprefix('found duplicate key ')!r} is twice in the same section; remove one of them"
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "the line is indented with a tab; indent with spaces"
    above = next((index for index in range(number - 1, -1, -1) if _content(lines[index])), None)
    is_layout = "<block end>" in problem or "mapping values are not allowed" in problem or "':'" in problem
    if above is None or not is_layout or _indent(line) == _indent(lines[above]) or not _content(line):
        return None
    shown_lines = "\n".join(
        f"    line {index + 1} ({_indent(lines[index])} spaces): {lines[index]}" for index in (above, number)
    )
    return (
        "the line is not indented like the lines of its section; keys of one section have the same indent, and keys "
        f"below a section have more:\n{shown_lines}"
    )


def _content(line: str) -> str:
    return "" if line.lstrip().startswith("#") else line.strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _interpolation_error(path: Path, lines: Mapping[KeyPath, int], error: OmegaConfBaseException) -> str:
    key = key_path(error.full_key or "")
    where = place(path, lines[key]) if key in lines else shown(path)
    if isinstance(error, UnsupportedValueType):  # `!!set`
        return f"{where}: {error.full_key} has a value of a type that a configuration cannot have: {reason_of(error)}"
    return f"{where}: {error.full_key} is not a valid ${{…}} reference: {reason_of(error)}"


def too_long(digits: str) -> str:
    """Return the problem with a number of more than `MAX_DIGITS` digits."""
    return f"is a number of {len(digits):,} digits; expected a shorter one"


class _InvalidNode(Exception):
    """A key or value that YAML permits and a configuration does not: the problem, and its line."""


def key_path(full_key: str) -> KeyPath:
    """Return OmegaConf's name of a key (`a.b[0].c`) as a path."""
    return tuple(part for part in re.split(r"[.\[\]]+", full_key) if part)


def reason_of(error: Exception) -> str:
    """Return the reason of an OmegaConf or Hydra error: the first line of its message."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", line).strip('"')


def _collect_lines(loader: yaml.SafeLoader, node: yaml.Node, prefix: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
        raise _InvalidNode(f"{'.'.join(prefix)} {too_long(node.value)}", node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and node.value == "???":  # OmegaConf's mark of a missing value
        text = f"{'.'.join(prefix)} is ???, which stands for a missing value; write a value, or remove the key"
        raise _InvalidNode(text, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _add_line(loader, (*prefix, str(index)), item, item, lines)
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)  # `<<: *base` adds the base's keys, with their lines
        for key, value in node.value:
            if key.tag in _TAGS_OF_NO_KEY:
                text = f"the key {key.value or 'null'!r} is {_TAGS_OF_NO_KEY[key.tag]} in YAML; write it in quotes"
                raise _InvalidNode(text, key.start_mark.line + 1)
            _add_line(loader, (*prefix, str(key.value)), key, value, lines)


_TAGS_OF_NO_KEY = {"tag:yaml.org,2002:bool": "a Boolean", "tag:yaml.org,2002:null": "empty"}


def _add_line(
    loader: yaml.SafeLoader, path: KeyPath, start: yaml.Node, value: yaml.Node, lines: dict[KeyPath, int]
) -> None:
    lines[path] = start.start_mark.line + 1
    if len(lines) > _MAX_VALUES:  # anchors in anchors multiply
        raise _InvalidNode(f"the file has more than {_MAX_VALUES:,} values", lines[path])
    _collect_lines(loader, value, path, lines)
