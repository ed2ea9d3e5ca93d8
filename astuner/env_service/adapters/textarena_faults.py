"""Which games of TextArena cannot be played on this machine, and why."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import nltk
import textarena

from astuner.errors import EnvError

_VARIANTS = ("-train", "-raw")
"""The endings of the ids that are another id with other wrappers. They can be created, but are not listed."""
_FILES = {"ScorableGames": "games_descriptions", "UsedCarNegotiation": "instructions"}
"""Folders that games read, and that the package of textarena 0.7.4 does not contain."""
_DEFECTS = {"CharacterConclave": "its first step raises a TypeError in textarena 0.7.4"}


@cache
def faults() -> Mapping[str, str]:
    """Return why games cannot be played on this machine without a network, by id. No game is imported for this."""
    found = {name: fault_of(game) for name, game in games().items()}
    return {name: fault for name, fault in found.items() if fault is not None}


def games() -> dict[str, Any]:
    """Return the registered games by id, without the variants that differ in wrappers only."""
    return {
        name: game for name, game in textarena.envs.registration.ENV_REGISTRY.items() if not name.endswith(_VARIANTS)
    }


def fault_of(game: Any) -> str | None:
    """Return why a game cannot be played on this machine, from its source, or None."""
    module = game.entry_point.partition(":")[0]
    source = _source_file(module)
    folder = source.parent
    if not source.is_file():
        return f"textarena {textarena.__version__} has no module {module}"
    if folder.name in _DEFECTS:
        return _DEFECTS[folder.name]
    if folder.name in _FILES and not (folder / _FILES[folder.name]).is_dir():
        return f"textarena {textarena.__version__} lacks its files {folder.name}/{_FILES[folder.name]}"
    for file in sorted(_imported(source)):
        fault = _source_fault(file)
        if fault is not None:
            return fault
    asks_models = "OpenRouter" in source.read_text(encoding="utf-8") or "OpenRouter" in str(game.kwargs)
    if asks_models and not os.environ.get("OPENROUTER_API_KEY"):
        return "it asks models of OpenRouter: set the environment variable OPENROUTER_API_KEY"
    return None


def _source_file(module: str) -> Path:
    path = Path(textarena.__file__).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(source: Path) -> set[Path]:
    """Return a game's source files: its own and those of TextArena that they import by name."""
    found: set[Path] = set()
    open_files = [source]
    while open_files:
        file = open_files.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        with contextlib.suppress(SyntaxError):
            open_files += [
                _source_file(node.module)
                for node in ast.walk(_parsed(file))
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("textarena.envs.")
            ]
    return found


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _source_fault(file: Path) -> str | None:
    """Return what a source file needs and this machine lacks: a Python version, a package or data of NLTK."""
    try:
        nodes = list(ast.walk(_parsed(file)))
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        return (
            f"{file.parent.name}/{file.name}, line {error.lineno}, is a syntax error in Python {version}: {error.msg}"
        )
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module)
        for module in modules:
            package = module.partition(".")[0]
            if importlib.util.find_spec(package) is None:
                return f"it needs package {package}, which is not installed"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nltk.download":
            try:
                require_data(ast.literal_eval(node.args[0]))
            except EnvError as error:
                return str(error)
    return None


def require_data(data: str | Sequence[str], *_: Any, **__: Any) -> bool:
    """Check that data of NLTK is installed; it replaces `nltk.download`.

    Raises:
        EnvError: the data is not installed.
    """
    for name in [data] if isinstance(data, str) else data:
        for kind in ("corpora", "taggers", "tokenizers"):
            with contextlib.suppress(LookupError):
                nltk.data.find(f"{kind}/{name}")
                break
        else:
            raise EnvError(f"it needs data of NLTK, and astuner downloads nothing: python -m nltk.downloader {name}")
    return True
