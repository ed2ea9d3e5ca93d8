"""Keys that the installed verl and vLLM declare, for the parts of a configuration that are passed through to them.

The fields of dataclasses and their types are read from source files, without importing the packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from astuner.config.keys import KeyPath, dotted
from astuner.errors import did_you_mean

_ENGINE_ARGS = "AsyncEngineArgs"
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "dict": (Mapping,),
    "Dict": (Mapping,),
    "list": (list, tuple),
    "List": (list, tuple),
    "tuple": (list, tuple),
}


def verl_classes() -> dict[str, DeclaredClass]:
    """Return the classes of the installed verl's configuration; none without verl."""
    folder = _package_folder("verl")
    if folder is None:
        return {}
    others = ("base_config.py", "trainer/config/config.py", "utils/profiler/config.py")
    return declared_classes(
        (*sorted((folder / "workers" / "config").glob("*.py")), *(folder / name for name in others))
    )


def engine_argument_errors(name: KeyPath, path: KeyPath, value: object) -> Iterator[str]:
    """Yield a text for each argument that the installed vLLM lacks, or has with another type; none without vLLM.

    `name` is the full key of the arguments. `path` names one argument below it, and is empty if `value` is a mapping of
    arguments.
    """
    folder = _package_folder("vllm")
    classes = {} if folder is None else declared_classes((folder / "engine" / "arg_utils.py",))
    if _ENGINE_ARGS in classes:
        yield from field_errors(classes, _ENGINE_ARGS, name, path, value)


def _package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    try:
        spec = find_spec(name)
    except ValueError:  # a substitute for the package, without a specification, has been imported
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@dataclass(frozen=True, slots=True)
class DeclaredClass:
    """A dataclass in a source file.

    Attributes:
        bases: names of its base classes.
        fields: field to its annotation.
    """

    bases: tuple[str, ...]
    fields: Mapping[str, ast.expr]


@cache
def declared_classes(files: tuple[Path, ...]) -> dict[str, DeclaredClass]:
    """Return the classes of source files by name. Files that do not exist have none."""
    classes = {}
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                fields = {
                    item.target.id: item.annotation
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                classes[node.name] = DeclaredClass(tuple(_name(base) for base in node.bases), fields)
    return classes


def field_errors(
    classes: Mapping[str, DeclaredClass], cls: str, name: KeyPath, path: KeyPath, value: object
) -> Iterator[str]:
    """Yield a text for each unknown name and each value of a wrong type.

    Types that this function does not know accept any value, and every field accepts null: dataclasses do not check it.

    Args:
        classes: as returned by `declared_classes`.
        cls: the class of the section.
        name: the section's full key, for the texts.
        path: the value's path in the section; empty for the section itself.
        value: the value.
    """
    if not path:
        if isinstance(value, Mapping):
            for key, below in value.items():
                yield from field_errors(classes, cls, name, tuple(str(key).removeprefix("+").split(".")), below)
        elif value is not None:
            yield f"{dotted(name)} is {value!r}; expected a section"
        return
    fields, full = all_fields(classes, cls), (*name, path[0])
    if path[0] not in fields:
        hint = did_you_mean(path[0], fields, show=lambda field: repr(dotted((*name, field))))
        yield f"unknown key {dotted(full)!r}; {hint or f'the installed {cls} has no such field'}"
        return
    options = list(_options(fields[path[0]]))
    nested = [option for option in options if option in classes]
    if nested and (path[1:] or isinstance(value, Mapping)):
        yield from field_errors(classes, nested[0], full, path[1:], value)
    elif not path[1:]:
        yield from _type_errors(full, options, value)
    elif all(option in _TYPES and _TYPES[option] != (Mapping,) for option in options):
        yield f"unknown key {dotted((*full, *path[1:]))!r}; {dotted(full)} is a value, not a section"


def _type_errors(name: KeyPath, options: list[str], value: object) -> Iterator[str]:
    literals = [ast.literal_eval(option[1:]) for option in options if option.startswith("=")]
    kinds = [option for option in options if not option.startswith("=")]
    is_reference = isinstance(value, str) and value.startswith("${")
    is_open = any(kind not in _TYPES for kind in kinds if kind != "None")
    if value is None or is_reference or is_open or value in literals:
        return
    for kind in kinds:
        # In Python, True is an int.
        if kind in _TYPES and isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool)):
            return
    expected = " or ".join([*(repr(literal) for literal in literals), *kinds])
    hint = did_you_mean(value, map(str, literals), "; did you mean {}?")
    yield f"{dotted(name)} is {value!r}; expected {expected}{hint}"


def all_fields(classes: Mapping[str, DeclaredClass], cls: str) -> dict[str, ast.expr]:
    """Return a class's fields and their annotations, including those of its base classes."""
    if cls not in classes:
        return {}
    declared = classes[cls]
    inherited = {name: field for base in reversed(declared.bases) for name, field in all_fields(classes, base).items()}
    return {**inherited, **declared.fields}


def _options(annotation: ast.expr) -> Iterator[str]:
    """Yield a union's types by name, and a Literal's values as `=value`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _options(ast.parse(annotation.value, mode="eval").body)
    elif isinstance(annotation, ast.BinOp):
        yield from _options(annotation.left)
        yield from _options(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        outer = _name(annotation.value)
        if outer == "Literal":
            yield from (f"={ast.unparse(value)}" for value in inner)
        elif outer in ("Optional", "Union"):
            yield from (option for part in inner for option in _options(part))
            yield from ["None"] if outer == "Optional" else []
        else:
            yield outer
    else:
        yield _name(annotation)


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]
