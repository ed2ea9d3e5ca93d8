"""Keys that the installed verl and vLLM declare, for the parts of a configuration that are passed through to them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from astuner.config.declared_fields import DeclaredClass, declared_classes, field_errors
from astuner.config.keys import KeyPath

_ENGINE_ARGS = "AsyncEngineArgs"


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
    """Yield a text for each argument that the installed vLLM does not have, or not with this type; none without vLLM.

    Args:
        name: the full key of the arguments.
        path: the argument; empty for a mapping of arguments.
        value: its value.
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
