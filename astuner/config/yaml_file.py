"""Finds YAML files, reads one as a tree of values with each key's line, and writes a configuration as YAML."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedValueType

from astuner.config.keys import KeyPath, dotted, is_changed, schema, without
from astuner.config.root import WITHOUT_EFFECT, RunConfig
from astuner.config.validation import Problem
from astuner.errors import ConfigError, did_you_mean
from astuner.system.redaction.redactor import learn_secret_settings, redact_settings

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "default_config"
SUFFIXES = (".yaml", ".yml")
MAX_DIGITS = 4000
"""Digits of a number; Python converts at most 4,300."""
_MAX_VALUES = 100_000
_TAGS_OF_NO_KEY = {"tag:yaml.org,2002:bool": "a Boolean", "tag:yaml.org,2002:null": "empty"}
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_ESCAPED_REFERENCE = re.compile(r"(\\*)\$\{")
_SHIPPED_ENTRY = re.compile(r"^(?:file://)?(?:\./)?(?:astuner|astune|ajet)/default_config(?:/|$)")


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A file as read, with references unresolved.

    Attributes:
        path: the file.
        text: its content.
        tree: its values, as OmegaConf reads them and not YAML 1.1: `1e-6` is a float, and a date is text.
        lines: 1-based line of every key and list item; an item's path ends with its index.
        notices: another name of a key to the notice about it.
        problems: other names of keys that are also set, to another value.
    """

    path: Path
    text: str
    tree: Mapping[str, Any]
    lines: Mapping[KeyPath, int]
    notices: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

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
        folder = path.parent
        if not folder.is_dir():
            raise ConfigError(f"no file {shown(path)}: there is no folder {shown(folder)}") from None
        hint = did_you_mean(
            path.name, _yaml_names(folder), "; did you mean {}?", show=lambda name: shown(folder / name), cutoff=0.5
        )
        raise ConfigError(f"no file {shown(path)}{hint}") from None
    except IsADirectoryError:
        names = [shown(path / name) for name in _yaml_names(path)[:3]]
        hint = f"; did you mean {' or '.join(names)}?" if names else ""
        raise ConfigError(f"{shown(path)} is a folder; expected a YAML file{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be read: {error.strerror}") from None


def _yaml_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)


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
    """Return the reason for an OmegaConf or Hydra error: the first line of its message."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", line).strip('"')


def _collect_lines(loader: yaml.SafeLoader, node: yaml.Node, prefix: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
        raise _InvalidNode(f"{'.'.join(prefix)} {too_long(node.value)}", node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and _is_surprising(node):
        read = loader.construct_object(node)
        text = (
            f"{'.'.join(prefix)} is {node.value}, which YAML reads as {read:g}; write plain digits, or text in quotes"
        )
        raise _InvalidNode(text, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and node.value == "???":  # OmegaConf's mark of a missing value
        text = f"{'.'.join(prefix)} is ???, which stands for a missing value; write a value, or remove the key"
        raise _InvalidNode(text, node.start_mark.line + 1)
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)  # `<<: *base` adds the base's keys, with their lines
        children = [(str(key.value), key, value) for key, value in node.value]
    for name, start, value in children:
        line = start.start_mark.line + 1
        if isinstance(node, yaml.MappingNode) and start.tag in _TAGS_OF_NO_KEY:
            text = f"the key {start.value or 'null'!r} is {_TAGS_OF_NO_KEY[start.tag]} in YAML; write it in quotes"
            raise _InvalidNode(text, line)
        lines[(*prefix, name)] = line
        if len(lines) > _MAX_VALUES:  # anchors in anchors multiply
            raise _InvalidNode(f"the file has more than {_MAX_VALUES:,} values", line)
        _collect_lines(loader, value, (*prefix, name), lines)


def _is_surprising(node: yaml.ScalarNode) -> bool:
    """Return whether YAML 1.1 reads a number in a way that hardly anyone means: `010` is 8, and `1:30` is 90."""
    if node.tag == "tag:yaml.org,2002:int":
        return ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value) is not None
    return node.tag == "tag:yaml.org,2002:float" and ":" in node.value


def search_folders(main: YamlFile, override: list[str] | None) -> tuple[Path, ...]:
    """Return the main file's folder, followed by the folders in its `hydra.searchpath`.

    Entries that name the package's `astuner/default_config` are skipped: it is always searched.

    Args:
        main: the main file.
        override: `hydra.searchpath` from the command line, which replaces the main file's.

    Raises:
        ConfigError: an entry is not an existing folder.
    """
    base = main.path.absolute().parent
    folders = [base]
    for index, entry in enumerate(_search_path(main) if override is None else override):
        where = "command line" if override is not None else main.where(("hydra", "searchpath", str(index)))
        folder = None if _SHIPPED_ENTRY.match(entry) else _folder(entry, base, where)
        if folder is not None and not folder.is_relative_to(SHIPPED_FOLDER) and folder not in folders:
            folders.append(folder)
    return tuple(folders)


def _search_path(file: YamlFile) -> list[str]:
    section = file.tree.get("hydra")
    if not isinstance(section, dict) or not section.get("searchpath"):
        return []
    where = file.where(("hydra", "searchpath"))
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create({"entries": section["searchpath"]}), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: hydra.searchpath: {reason_of(error)}") from error
    if not isinstance(tree["entries"], list):
        raise ConfigError(f"{where}: hydra.searchpath is {tree['entries']!r}; expected a list of file:// folders")
    return [str(entry) for entry in tree["entries"]]


def _folder(entry: str, base: Path, where: str) -> Path:
    scheme, separator, rest = entry.rpartition("://")
    if separator and scheme != "file":
        raise ConfigError(f"{where}: hydra.searchpath entry {entry!r}: only file:// folders are supported")
    path = Path(os.path.expanduser(rest))
    candidates = (path,) if path.is_absolute() else (base / path, Path.cwd() / path)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    tried = " nor ".join(str(candidate) for candidate in candidates)
    raise ConfigError(f"{where}: hydra.searchpath entry {entry!r} is not a folder: there is no {tried}")


def find_yaml(folder: Path, name: str) -> Path | None:
    """Return the file of the `defaults` entry `name` in a folder, or None."""
    names = (name,) if name.endswith(SUFFIXES) else tuple(name + suffix for suffix in SUFFIXES)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def hydra_errors(file: YamlFile, main: YamlFile) -> Iterator[Problem]:
    """Yield each error in a file's `hydra:` section: the main file can have a `searchpath`."""
    section = file.tree.get("hydra")
    for name in section if isinstance(section, dict) else ():
        key = ("hydra", str(name))
        if name != "searchpath":
            yield Problem(f"{'.'.join(key)} has no effect; remove it", file.where(key))
        elif file is not main and not all(_SHIPPED_ENTRY.match(entry) for entry in _search_path(file)):
            text = f"hydra.searchpath has an effect only in the main file ({main.path.name}); move it there"
            yield Problem(text, file.where(key))


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
        noticed = dotted(path) in WITHOUT_EFFECT or any(condition.at_default for condition in key.no_effect)
        if (noticed or not full) and not is_changed(config, path):
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
        return _ESCAPED_REFERENCE.sub(lambda match: match[1] * 2 + r"\${", value)
    return value
