"""What the user wrote, with canonical names: YAML files, and overrides on the command line in Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from astuner.config.keys import MISSING, KeyPath, dotted, get_at, parts, paths_in, schema, with_value, without
from astuner.config.root import WITHOUT_EFFECT
from astuner.config.validation import Draft, Problem, origin_of, outermost_unknown, unknown_key, wrong_containers
from astuner.config.yaml_file import MAX_DIGITS, YamlFile, reason_of, too_long
from astuner.errors import short_repr, shorten

COMMAND_LINE = "command line"
_SEARCH_PATH = "hydra.searchpath"
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS},}}")
_PLAIN_TEXT = re.compile(r"([^=\s]+=)([^\s,'\"\[\]{}][^,'\"\[\]{}]*)")
_REFERENCE = re.compile(r"(?<=\$\{)[A-Za-z_]\w*(?:\.\w+)+(?=\})")


@dataclass(frozen=True, slots=True)
class Alias:
    """An accepted alternative name.

    Attributes:
        kind: `section` and `key`: `old` is read as `new`. `bare`: plain text at section `old` is the value of its key
            `new`. `value`: value `old` of key `key` is read as `new`. `module`: so is the start of its value, a
            `package.module->Class`. `file`: an entry of a `defaults` list.
        old: the alias.
        new: the canonical name.
        key: the key whose value `value` and `module` replace.
    """

    kind: Literal["section", "key", "bare", "value", "module", "file"]
    old: str
    new: str
    key: str = ""


ALIASES = (
    Alias("section", "astune", "astuner"),
    Alias("section", "ajet", "astuner"),
    Alias("key", "astuner.rollout.agentscope_learn_protocol", "astuner.rollout.agentscope_workflow"),
    Alias("key", "astuner.trainer_common.trinity_only__n_vllm_engine", "astuner.rollout.n_vllm_engine"),
    Alias("key", "astuner.task_reader.env_service.env", "astuner.task_reader.env_service.env_type"),
    Alias("bare", "astuner.trainer_common.algorithm", "astuner.trainer_common.algorithm.adv_estimator"),
    Alias("bare", "astuner.trainer_common.correction", "astuner.trainer_common.correction.mode"),
    Alias("value", "customized_protocal", "customized_protocol", key="astuner.task_judge.judge_type"),
    Alias("value", "hf", "huggingface_dat_repo", key="astuner.task_reader.type"),
    Alias("value", "tracing", "feedback_tracing", key="astuner.task_reader.type"),
    Alias("module", "astune.task_judge.", "astuner.task_judge.", key="astuner.task_judge.judge_protocol"),
    Alias("module", "ajet.task_judge.", "astuner.task_judge.", key="astuner.task_judge.judge_protocol"),
    Alias("file", "astune_default", "astuner_default"),
    Alias("file", "ajet_default", "astuner_default"),
    Alias("file", "default", "verl_default"),
)


def _of_kind(*kinds: str) -> tuple[Alias, ...]:
    return tuple(alias for alias in ALIASES if alias.kind in kinds)


def canonical_key(key: KeyPath) -> tuple[KeyPath, Alias | None]:
    """Return a key's canonical name, and the alias that it was written with (the last of several), if any."""
    used = None
    for alias in _of_kind("section", "key"):
        old = parts(alias.old)
        if key[: len(old)] == old:
            key, used = (*parts(alias.new), *key[len(old) :]), alias
    return key, used


def canonical_file(file: YamlFile) -> YamlFile:
    """Return a file with canonical names and without empty sections."""
    result = replace(file, tree=_canonical_references(file.tree))
    for alias in _of_kind("section", "key"):
        result = _with_alias_moved(result, alias)
    for alias in _of_kind("bare"):
        section, key = parts(alias.old), parts(alias.new)
        value = get_at(result.tree, section)
        if isinstance(value, str):
            lines = {**result.lines, key: result.lines[section]}
            result = replace(result, tree=with_value(result.tree, key, value), lines=lines)
    mappings = {*schema().sections, *(path for path, key in schema().keys.items() if key.default == {})}
    empty = [path for path in mappings - {()} if get_at(result.tree, path, MISSING) is None]
    return replace(result, tree=without(result.tree, empty))


def _with_alias_moved(result: YamlFile, alias: Alias) -> YamlFile:
    old, new = parts(alias.old), parts(alias.new)
    value = get_at(result.tree, old, MISSING)
    if value is MISSING:
        return result
    tree, clashes = _merged(without(result.tree, [old]), new, value)
    problems = []
    for clash in clashes:
        written = (*old, *clash[len(new) :])
        text = (
            f"{dotted(written)} is another name of {dotted(clash)}, which line {result.lines[clash]} sets to "
            "another value; keep one of them"
        )
        problems.append(Problem(text, result.where(written), keys=(clash,)))
    lines = {path: line for path, line in result.lines.items() if path[: len(old)] != old}
    for path, line in result.lines.items():
        if path[: len(old)] == old:
            lines.setdefault((*new, *path[len(old) :]), line)
    notices = {**result.notices, alias.old: f"{result.where(old)}: {key_notice(alias)}"}
    return replace(result, tree=tree, lines=lines, notices=notices, problems=(*result.problems, *problems))


def _merged(tree: Mapping[str, Any], path: KeyPath, value: object) -> tuple[Mapping[str, Any], list[KeyPath]]:
    """Return `tree` with `value` merged in at `path`, and the keys that already have another value."""
    present = get_at(tree, path)
    if present is None:
        return with_value(tree, path, value), []
    if isinstance(present, Mapping) and isinstance(value, Mapping):
        clashes: list[KeyPath] = []
        for key, item in value.items():
            tree, below = _merged(tree, (*path, str(key)), item)
            clashes += below
        return tree, clashes
    differs = value is not None and (present != value or type(present) is not type(value))
    return tree, [path] if differs else []


def canonical_default_name(name: str) -> str:
    """Return the canonical name for an entry in a `defaults` list."""
    return next((alias.new for alias in _of_kind("file") if alias.old == name), name)


def key_notice(alias: Alias) -> str:
    """Return the notice about a `section` or `key` alias."""
    return f"{alias.old} is read as {alias.new}; write {alias.new}"


def _canonical_references(value: Any) -> Any:
    """Replace aliases in references inside text (`${ajet.rollout.x}`)."""
    if isinstance(value, dict):
        return {key: _canonical_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical_references(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return _REFERENCE.sub(lambda match: dotted(canonical_key(parts(match[0]))[0]), value)
    return value


def with_canonical_values(draft: Draft) -> Draft:
    """Replace aliases among the values, with a notice for each, and for each key that is set without effect."""
    tree, notices = draft.tree, list(draft.notices)
    for alias in _of_kind("value", "module"):
        path = parts(alias.key)
        value = get_at(tree, path)
        if isinstance(value, str) and (value == alias.old or (alias.kind == "module" and value.startswith(alias.old))):
            tree = with_value(tree, path, alias.new + value.removeprefix(alias.old))
            text = f"{alias.key}: {alias.old!r} is read as {alias.new!r}; write {alias.new!r}"
            notices.append(str(Problem(text, origin_of(draft.origins, path))))
    for key in WITHOUT_EFFECT:
        if parts(key) in draft.origins:
            text = f"{key} is accepted for older files and has no effect"
            notices.append(str(Problem(text, draft.origins[parts(key)])))
    return replace(draft, tree=tree, notices=tuple(notices))


@dataclass(slots=True)
class CommandLine:
    """Parsed overrides.

    Attributes:
        parsed: each override as parsed by Hydra, and its text.
        search_path: entries of `hydra.searchpath=[…]`, if it was given.
        lines: the overrides for Hydra, with canonical keys.
        keys: the keys that they set.
        deleted: the keys that they remove (`~key`).
        notices: alias to the notice about it.
        problems: invalid overrides.
    """

    parsed: list[tuple[Override, str]] = field(default_factory=list)
    search_path: list[str] | None = None
    lines: list[str] = field(default_factory=list)
    keys: list[KeyPath] = field(default_factory=list)
    deleted: list[KeyPath] = field(default_factory=list)
    notices: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def reject(self, text: str, *keys: KeyPath) -> None:
        """Add a problem, about certain keys."""
        self.problems.append(Problem(text, COMMAND_LINE, keys))


def parse_overrides(overrides: Sequence[str]) -> CommandLine:
    """Parse overrides by Hydra's grammar, without a check of their keys."""
    result = CommandLine()
    parser = OverridesParser.create()
    for given in overrides:
        if digits := _LONG_NUMBER.search(given):
            result.reject(f"{given.partition('=')[0]} {too_long(digits[0])}")
            continue
        try:
            override, line = _parsed(parser, given)
        except HydraException as error:
            result.reject(_not_parsed(given, error))
            continue
        if override.is_sweep_override():
            result.reject(f"{given!r} gives several values; write a list as key=[a,b], text as \"key='a,b'\"")
        elif override.is_hydra_override() and override.key_or_group != _SEARCH_PATH:
            result.reject(f"{override.key_or_group} has no effect; remove it")
        elif override.is_hydra_override():
            value = override.value()
            result.search_path = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        else:
            result.parsed.append((override, line))
    return result


def _parsed(parser: OverridesParser, line: str) -> tuple[Override, str]:
    """Return an override with its line, in quotes if it is text that Hydra's grammar does not permit without."""
    try:
        return parser.parse_override(line), line
    except HydraException as error:
        # For example, text with `>` or `=`: a shell removes quotes.
        if _PLAIN_TEXT.fullmatch(line):
            quoted = _PLAIN_TEXT.sub(r"\1'\2'", line)
            with suppress(HydraException):
                return parser.parse_override(quoted), quoted
        raise error


def _not_parsed(line: str, error: HydraException) -> str:
    """Return why an override is not `key=value`."""
    key, equals, value = line.partition("=")
    if not equals and schema().knows(canonical_key(parts(key.strip().lstrip("+~")))[0]):
        return f"{short_repr(line)} has no value; write {key.strip()}=VALUE"
    if not equals:
        return f"{short_repr(line)} is not key=value; write KEY=VALUE, without spaces"
    if key != key.strip() or value != value.lstrip():
        return (
            f"{short_repr(line)} has a space beside the equals sign; write {shorten(f'{key.strip()}={value.strip()}')}"
        )
    quoted = shorten(f"{key}='{value}'")
    return (
        f"{short_repr(line)} has characters with a meaning in Hydra's grammar ({shorten(reason_of(error))}); quote the "
        f'value, and the whole from the shell: "{quoted}"'
    )


def check_keys(result: CommandLine, is_group: Callable[[str], bool]) -> None:
    """Fill in the other fields of `result`; `is_group(name)` is whether Hydra has a config group of that name."""
    for override, line in result.parsed:
        if "." not in override.key_or_group and is_group(override.key_or_group):
            result.lines.append(line)
        else:
            _check_key(override, line, result)


def _check_key(override: Override, line: str, result: CommandLine) -> None:
    key, alias = canonical_key(parts(override.key_or_group))
    if alias is not None:
        result.notices[alias.old] = f"{COMMAND_LINE}: {key_notice(alias)}"
    value = override.value()
    if isinstance(value, str):  # `algorithm=sft` is `algorithm.adv_estimator=sft`
        key = next((parts(alias.new) for alias in _of_kind("bare") if parts(alias.old) == key), key)
    owner = schema().owner(key)
    if owner is not None and owner != key and not schema().keys[owner].free_form:
        if isinstance(schema().keys[owner].default, list | tuple):
            result.reject(f"{dotted(owner)} is a list, whose items cannot be set one by one; write the whole list")
        else:
            result.reject(f"{dotted(owner)} is a single value; there is no key {key[-1]!r} under it")
        return
    unknown = outermost_unknown(paths_in(value, key))
    if unknown:
        result.problems.extend(unknown_key(path, COMMAND_LINE) for path in unknown)
        return
    if override.is_delete() and len(key) == 1:  # for Hydra, a key without a dot is a config group
        result.reject(f"{line!r} cannot be removed: {key[0]} is a whole section; remove single keys: ~{key[0]}.KEY")
        return
    if not override.is_delete():
        wrong = dict(wrong_containers(value, key))
        if len(key) == 1 and not isinstance(value, dict):  # for Hydra, a key without a dot is a config group
            wrong[key] = f"{key[0]} is {value!r}; expected a section with keys below it: write {key[0]}.KEY=VALUE"
        for path, text in wrong.items():
            result.reject(text, *schema().below(path))
        if wrong:
            return
    # Hydra composes what the files set, without the defaults: it adds a key only with `++`, and cannot remove one.
    renamed = line.lstrip("+").replace(override.key_or_group, dotted(key), 1)
    if not override.is_delete():
        result.lines.append(f"++{renamed}")
    elif value is not None or not (key in schema().keys or key in schema().sections):
        result.lines.append(renamed)
    (result.deleted if override.is_delete() else result.keys).extend(paths_in(value, key))
