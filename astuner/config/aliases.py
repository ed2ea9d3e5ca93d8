"""Aliases of keys, sections, values and files, and their replacement by the canonical names."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.nested_dict import MISSING, drop_at, get_at, set_at
from astuner.config.problems import Problem
from astuner.config.yaml_file import YamlFile, place


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

WITHOUT_EFFECT = ("astuner.execute_test", "astuner.execute_testing_lambda")
"""Keys that are accepted and have no effect."""


def _of_kind(*kinds: str) -> tuple[Alias, ...]:
    return tuple(alias for alias in ALIASES if alias.kind in kinds)


@dataclass(slots=True)
class CanonicalFile:
    """A file with canonical names.

    Attributes:
        file: the file that was read.
        tree: its values under canonical keys, without empty sections.
        lines: line of every canonical key.
        notices: alias to the notice about it.
        problems: aliases whose canonical key is also set, to another value.
    """

    file: YamlFile
    tree: dict[str, Any]
    lines: dict[KeyPath, int]
    notices: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """Return `file:line` of a key that the file sets."""
        return place(self.file.path, self.lines[path])


def canonical_key(key: KeyPath) -> tuple[KeyPath, Alias | None]:
    """Return a key's canonical name, and the alias that it was written with (the last of several), if any."""
    used = None
    for alias in _of_kind("section", "key"):
        old = parts(alias.old)
        if key[: len(old)] == old:
            key, used = (*parts(alias.new), *key[len(old) :]), alias
    return key, used


def bare_key(key: KeyPath) -> KeyPath:
    """Return the key that plain text at `key` sets: `algorithm: sft` is `algorithm.adv_estimator: sft`."""
    return next((parts(alias.new) for alias in _of_kind("bare") if parts(alias.old) == key), key)


def canonical_file(file: YamlFile) -> CanonicalFile:
    """Return a file with canonical names; `file` is not changed."""
    result = CanonicalFile(file, _canonical_references(deepcopy(file.tree)), dict(file.lines))
    for alias in _of_kind("section", "key"):
        _move(result, parts(alias.old), parts(alias.new), alias)
    for alias in _of_kind("bare"):
        _spread(result, parts(alias.old), parts(alias.new))
    mappings = {*schema().sections, *(path for path, key in schema().keys.items() if key.default == {})}
    for path in mappings - {()}:
        if get_at(result.tree, path, default=MISSING) is None:
            drop_at(result.tree, path)
    return result


def canonical_values(tree: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    """Replace aliases among the values of a composed tree in place; return each changed key with a notice."""
    notices = []
    for alias in _of_kind("value", "module"):
        path = parts(alias.key)
        value = get_at(tree, path)
        if not isinstance(value, str):
            continue
        if alias.kind == "value" and value == alias.old:
            set_at(tree, path, alias.new)
        elif alias.kind == "module" and value.startswith(alias.old):
            set_at(tree, path, alias.new + value.removeprefix(alias.old))
        else:
            continue
        notices.append((path, f"{alias.key}: {alias.old!r} is read as {alias.new!r}; write {alias.new!r}"))
    return notices


def canonical_default_name(name: str) -> str:
    """Return the canonical name for an entry in a `defaults` list."""
    return next((alias.new for alias in _of_kind("file") if alias.old == name), name)


def key_notice(alias: Alias) -> str:
    """Return the notice about a `section` or `key` alias."""
    return f"{alias.old} is read as {alias.new}; write {alias.new}"


def _move(result: CanonicalFile, old: KeyPath, new: KeyPath, alias: Alias) -> None:
    value = get_at(result.tree, old, default=MISSING)
    if value is MISSING:
        return
    result.notices[alias.old] = f"{result.where(old)}: {key_notice(alias)}"
    drop_at(result.tree, old)
    for clash in _put(result.tree, new, value):
        written = (*old, *clash[len(new) :])
        text = (
            f"{dotted(written)} is another name of {dotted(clash)}, which line {result.lines[clash]} sets to "
            "another value; keep one of them"
        )
        result.problems.append(Problem(text, result.where(written), keys=(clash,)))
    renamed = {path: line for path, line in result.lines.items() if path[: len(old)] == old}
    for path, line in renamed.items():
        del result.lines[path]
        result.lines.setdefault((*new, *path[len(old) :]), line)


def _put(tree: dict[str, Any], path: KeyPath, value: object) -> list[KeyPath]:
    """Merge `value` in at `path`; return the keys that already have another value."""
    present = get_at(tree, path)
    if present is None:
        set_at(tree, path, value)
    elif isinstance(present, dict) and isinstance(value, dict):
        return [clash for key, item in value.items() for clash in _put(tree, (*path, str(key)), item)]
    elif value is not None and (present != value or type(present) is not type(value)):
        return [path]
    return []


def _spread(result: CanonicalFile, section: KeyPath, key: KeyPath) -> None:
    value = get_at(result.tree, section)
    if isinstance(value, str):
        set_at(result.tree, section, {key[-1]: value})
        result.lines[key] = result.lines[section]


def _canonical_references(value: Any) -> Any:
    """Replace aliases in references inside text (`${ajet.rollout.x}`)."""
    if isinstance(value, dict):
        return {key: _canonical_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical_references(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return _REFERENCE.sub(lambda match: dotted(canonical_key(parts(match[0]))[0]), value)
    return value


_REFERENCE = re.compile(r"(?<=\$\{)[A-Za-z_]\w*(?:\.\w+)+(?=\})")
