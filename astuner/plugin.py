"""Import of the user's classes and functions from `package.module->Name` or `some/file.py->Name`.

`package.module:Name` means the same, and needs no quotes in a shell.

A module is searched for in the given folders first (the working directory, the folder of the YAML file), then among the
installed modules. The folders are added to `sys.path`, so that the files in them import each other as usual.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from astuner.debugging.tracebacks import traceback_of
from astuner.errors import PluginError, did_you_mean, short_repr

T = TypeVar("T")

_EXTRAS = {
    "agents": "openai-agents",
    "autogen_agentchat": "autogen",
    "autogen_ext": "autogen",
    "google.adk": "google-adk",
    "langchain_openai": "langgraph",
    "langgraph": "langgraph",
    "pydantic_ai": "pydantic-ai",
    "gymnasium": "gymnasium",
    "minigrid": "minigrid",
    "reasoning_gym": "reasoning-gym",
    "textarena": "textarena",
    "smolagents": "smolagents",
    "anthropic": "anthropic",
}
"""By module: the extra of astuner that installs it."""


def load_class(path: str, base: type[T], *, search: Sequence[Path] = ()) -> type[T]:
    """Return the class at `path`, a concrete subclass of `base`.

    Args:
        path: `package.module->Class` or `some/file.py->Class`.
        base: The required base class.
        search: Folders to search before the installed modules, in this order.

    Raises:
        PluginError: If the path is malformed, the module does not exist or raises on import, or the object is not a
            concrete subclass of `base`.
    """
    return subclass_at(path, load_object(path, search=search), base)


def subclass_at(path: str, value: object, base: type[T]) -> type[T]:
    """Return `value`, the object at `path`, if it is a concrete subclass of `base`; `PluginError` if it is not."""
    expected = f"{base.__module__}.{base.__qualname__}"
    if not isinstance(value, type):
        raise PluginError(f"`{path}` is {describe(value)}; expected a class that derives from {expected}.")
    if not issubclass(value, base):
        parents = ", ".join(f"{parent.__module__}.{parent.__qualname__}" for parent in value.__bases__)
        raise PluginError(
            f"`{path}` is a class that derives from {parents}; expected one that derives from {expected}."
            f" Write `class {value.__name__}({base.__name__}):`."
        )
    if missing := sorted(getattr(value, "__abstractmethods__", ())):
        raise PluginError(f"`{path}` does not define {', '.join(missing)}, which subclasses of {expected} must define.")
    return value


def load_object(path: str, *, search: Sequence[Path] = ()) -> object:
    """Return the object at `path`; see `load_class` for the notation and the search order.

    Raises:
        PluginError: If the path is malformed, the module does not exist or raises on import, or has no such name.
    """
    module_name, name = _module_and_name(path)
    if not (module_name and name.isidentifier()):
        raise PluginError(
            f"{short_repr(path)} is not of the form `package.module->Name` or `some/file.py->Name`; {_arrow_hint(path)}"
        )
    folders = list(dict.fromkeys(Path(folder).resolve() for folder in search))
    importlib.invalidate_caches()  # A file may have been created after its folder was last scanned.
    is_file = module_name.endswith(".py") or "/" in module_name
    load = _load_file if is_file else _load_module
    module = load(path, module_name, name, folders)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [public for public in dir(module) if not public.startswith("_")]
        defined = [n for n in names if getattr(getattr(module, n, None), "__module__", None) == module.__name__]
        hint = did_you_mean(name, names, " Did you mean {}?", show=str, most=3)
        if defined and not hint:
            hint = f" It defines {', '.join(defined[:10])}."
        raise PluginError(f"`{path}`: {module.__file__ or module.__name__} has no {name}.{hint}") from None
    except Exception as error:  # A module's `__getattr__` may import on demand.
        raise _import_failed(path, module_name, error) from error


def _module_and_name(path: str) -> tuple[str, str]:
    """Split `module->Name` or `module:Name`; the name is empty if the path is neither."""
    module, _, name = path.partition("->") if "->" in path else path.rpartition(":")
    return module.strip(), name.strip()


def imported_packages(path: str, search: Sequence[Path] = ()) -> list[str]:
    """Return what the module at `path` imports from installed packages at its top level, without importing it.

    Each is the name of a module, or `module:name` (see `pkgutil.resolve_name`).
    """
    module, _ = _module_and_name(path)
    if (file := _file_of(module, [Path(folder).resolve() for folder in search])) is None:
        return []
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # the import reports it
        return []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module if alias.name == "*" else f"{node.module}:{alias.name}" for alias in node.names]
    return [name for name in names if _is_installed(re.split("[.:]", name)[0])]


def _is_installed(package: str) -> bool:
    if package in sys.stdlib_module_names:
        return False
    if package == "astuner":  # even if it is not
        return True
    spec = PathFinder.find_spec(package)
    return spec is not None and "-packages" in Path(spec.origin or "").parent.as_posix()


def _file_of(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a user's module, which is `package.module` or a path; None if there is none."""
    if module.endswith(".py") or "/" in module:
        candidates = (folder / Path(module).expanduser() for folder in folders)
        return next((candidate for candidate in candidates if candidate.is_file()), None)
    return next((found for folder in folders if (found := _module_file(folder, module))), None)


def reject_missing(path: str, *, search: Sequence[Path] = ()) -> None:
    """Raise the error of `load_object` if the object cannot exist. Otherwise, its module is not imported.

    Raises:
        PluginError: If the path is malformed, or there is no such file, module or name, or the file is not Python.
    """
    module, name = _module_and_name(path)
    folders = [Path(folder).resolve() for folder in search]
    file = _file_of(module, folders)
    is_file_path = module.endswith(".py") or "/" in module
    if file is None and not is_file_path and PathFinder.find_spec(module.partition(".")[0]) is not None:
        return  # An installed package. Its modules are found by importing it.
    code = b"" if file is None else file.read_bytes()
    with suppress(SyntaxError, ValueError):  # a null byte
        ast.parse(code)
        # A name that occurs nowhere in its module can only come from a star import or `__getattr__`.
        if re.search(rf"\b{re.escape(name)}\b|import +\*|__getattr__".encode(), code):
            return
    load_object(path, search=search)


def load_function(path: str, *, search: Sequence[Path] = ()) -> Callable[..., Any]:
    """Return the function at `path`; see `load_class` for the notation and the search order.

    Raises:
        PluginError: If the path is malformed, the module does not exist or raises on import, or the object is not
            callable.
    """
    value = load_object(path, search=search)
    if not callable(value):
        raise PluginError(f"`{path}` is {describe(value)}; expected a function.")
    return value


def raised_at(error: BaseException, within: Path | None = None) -> str:
    """Return the `file:line` where `error` was raised.

    Args:
        error: An exception that was raised.
        within: Folder of the user's code. The innermost frame in this folder is preferred over the innermost frame.
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(traceback_of(error))
        if not frame.filename.startswith("<frozen importlib") and frame.filename not in (__file__, importlib.__file__)
    ]
    # A virtual environment may be inside the folder; packages installed there are not the user's code.
    user_frames = [
        frame
        for frame in frames
        if within is not None
        and Path(frame.filename).is_relative_to(within)
        and "site-packages" not in Path(frame.filename).parts
    ]
    if not frames:
        return "an unknown place"
    innermost = (user_frames or frames)[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def _arrow_hint(path: str) -> str:
    """Return how to write a path without an arrow, such as `package.module.Name`."""
    if path.endswith("-"):
        return f"a shell takes `>` for a redirection of the output: write '{path}>Name' in quotes, or {path[:-1]}:Name"
    module, separator, name = path.strip().rpartition(".")
    if separator and name.isidentifier() and name != "py" and module.replace(".", "").replace("/", "").isidentifier():
        return f"did you mean `{module}->{name}`?"
    return "for example `agent->Agent` for class Agent in agent.py"


def _load_module(path: str, dotted: str, name: str, folders: list[Path]) -> ModuleType:
    if not all(part.isidentifier() for part in dotted.split(".")):
        raise PluginError(f"`{path}`: {dotted!r} is not a module name such as `package.module`.")
    if dotted.partition(".")[0] not in ("astuner", *sys.stdlib_module_names):
        matches = [(file, folder) for folder in folders if (file := _module_file(folder, dotted))]
        files = list(dict.fromkeys(file for file, _ in matches))
        if len(files) > 1:
            raise PluginError(f"`{path}` is ambiguous: {files[0]} and {files[1]} have the same name; rename one.")
        if matches:
            return _import_file(path, dotted, *matches[0], folders)
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:
        if not _is_missing(dotted, error):
            raise _import_failed(path, dotted, error) from error
    searched = f"no {dotted.replace('.', '/')}.py in {', '.join(map(str, folders))}, and " if folders else ""
    above = next((parent for folder in folders for parent in folder.parents if _module_file(parent, dotted)), None)
    if above is not None:
        raise PluginError(
            f"`{path}`: {searched}no installed module {dotted}. Run the command in {above}, which has it."
        )
    nearest = _nearest_module(dotted, folders)
    defining = _modules_that_define(name, dotted.split(".")[:-1], folders)
    if defining:
        nearest = f"{nearest if nearest in defining else defining[0]}->{name}"
    hint = f"Did you mean `{nearest}`?" if nearest else "Give the name of a module or the path of a .py file."
    raise PluginError(f"`{path}`: {searched}no installed module {dotted}. {hint}")


def _load_file(path: str, file_name: str, name: str, folders: list[Path]) -> ModuleType:
    relative = Path(file_name).expanduser()
    candidates = list(dict.fromkeys((folder / relative).resolve() for folder in folders or [Path.cwd()]))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        names = [entry.name for c in candidates if c.parent.is_dir() for entry in c.parent.glob("*.py")]
        hint = did_you_mean(relative.name, names, " Did you mean {}?", show=str, most=3)
        if not (hint or relative.is_absolute()) and (
            defining := _modules_that_define(name, relative.parent.parts, folders)
        ):
            hint = f" Did you mean `{defining[0]}->{name}`?"
        raise PluginError(f"`{path}`: no file {', '.join(map(str, candidates))}.{hint}")
    if "." in file.stem or file.suffix != ".py":
        raise PluginError(f"`{path}`: {file.name} cannot be imported; give it a name such as `my_agent.py`.")
    folder = next((folder for folder in folders if file.is_relative_to(folder)), file.parent)
    parts = file.relative_to(folder).with_suffix("").parts
    if any("." in part for part in parts):  # For example `.hidden/file.py`, which has no dotted name from `folder`.
        folder, parts = file.parent, (file.stem,)
    return _import_file(path, ".".join(parts), file, folder, folders)


def _import_file(path: str, dotted: str, file: Path, folder: Path, folders: list[Path]) -> ModuleType:
    """Import `file` as module `dotted` of `folder`."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == file:
        return main  # A script that names its own class must not run a second time.
    _search_first(list(dict.fromkeys([folder, *folders])))
    _prefer_folder(dotted.partition(".")[0], folder, folders)
    try:
        module = importlib.import_module(dotted)
    except (Exception, SystemExit) as error:
        parent = sys.modules.get(dotted.partition(".")[0])
        if parent is None or not _is_missing(dotted, error):
            raise _import_failed(path, str(file), error, folder) from error
        imported = parent
    else:
        if module.__file__ is not None and Path(module.__file__).resolve() == file:
            return module
        imported = module
    raise PluginError(
        f"`{path}`: Python imports the module name `{imported.__name__}` from {imported.__file__ or 'elsewhere'},"
        f" not from {folder}; rename one of them."
    )


def _search_first(folders: list[Path]) -> None:
    """Put folders at the beginning of `sys.path`, where Python puts a script's: before the folders of PYTHONPATH.

    A folder with a module that has the name of one of the standard library comes after that library, and before the
    installed packages.
    """
    library = sys.stdlib_module_names
    modules = {
        folder: [*folder.glob("*.py"), *(file.parent for file in folder.glob("*/__init__.py"))] for folder in folders
    }
    later = [folder for folder in folders if any(module.stem in library for module in modules[folder])]
    rest = [entry for entry in sys.path if not entry or Path(entry).resolve() not in folders]
    packages = (i for i, entry in enumerate(rest) if entry.endswith(("site-packages", "dist-packages")))
    position = next(packages, len(rest))
    rest[position:position] = map(str, later)
    sys.path[:] = [*(str(folder) for folder in folders if folder not in later), *rest]


def _prefer_folder(package: str, folder: Path, folders: list[Path]) -> None:
    """Make `package` the directory with that name in `folder`, if another `sys.path` folder has a module so named.

    Python prefers a module to a directory without `__init__.py`, wherever they are in `sys.path`. For example, a YAML
    file in `agent/` is run from the folder above and names `agent.agent->Class`: `agent/` is searched, too. An editable
    install adds the root of astuner's repository to `sys.path`, which has a `launcher.py`.
    """
    searched = (*folders, Path(__file__).resolve().parents[1])
    shadowed = any((other / f"{package}.py").is_file() for other in searched if other != folder)
    spec = PathFinder.find_spec(package, [str(folder)])
    if shadowed and package not in sys.modules and spec is not None and spec.loader is None:
        sys.modules[package] = module_from_spec(spec)


def _is_missing(dotted: str, error: BaseException) -> bool:
    """Return whether `error` means that `dotted` or a parent package does not exist."""
    return (
        isinstance(error, ModuleNotFoundError) and error.name is not None and f"{dotted}.".startswith(f"{error.name}.")
    )


def _import_failed(path: str, module: str, error: BaseException, folder: Path | None = None) -> PluginError:
    reason = f"{type(error).__name__}: {error}"
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name is not None else ""
    extra = _EXTRAS.get(missing) or _EXTRAS.get(missing.partition(".")[0])
    install = f' It needs: pip install "astuner[{extra}]".' if extra is not None else ""
    return PluginError(f"`{path}`: importing {module} raised {reason} (at {raised_at(error, folder)}).{install}")


def _module_file(folder: Path, dotted: str) -> Path | None:
    base = folder.joinpath(*dotted.split("."))
    files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file.resolve() for file in files if file.is_file()), None)


def _modules_that_define(name: str, package: Sequence[str], folders: list[Path]) -> list[str]:
    """Return the modules in `package`, then in the folders themselves, whose text defines the class or function."""
    definition = re.compile(rf"^(?:class|def|async def) +{name}\b".encode(), re.MULTILINE)
    modules = {
        ".".join((*parts, file.stem)): None
        for folder in folders
        for parts in (tuple(package), ())
        for file in sorted(folder.joinpath(*parts).glob("*.py"))
        if file.stem.isidentifier() and file.is_file() and definition.search(file.read_bytes())
    }
    return list(modules)


def _nearest_module(dotted: str, folders: list[Path]) -> str | None:
    """Return the existing module with the most similar dotted name, compared part by part."""
    try:
        spec = find_spec(dotted.partition(".")[0])
    except ValueError:  # A module without a spec, such as `__main__`.
        spec = None
    installed = [Path(entry).parent for entry in (spec.submodule_search_locations or ())] if spec else []
    for folder in (*folders, *installed, Path(__file__).resolve().parents[1]):
        nearest: list[str] = []
        for part in dotted.split("."):
            parent = folder.joinpath(*nearest)
            names = [e.stem for e in parent.iterdir() if e.suffix == ".py" or e.is_dir()] if parent.is_dir() else []
            nearest += [part] if part in names else get_close_matches(part, names, 1)
        if nearest and nearest != dotted.split(".") and _module_file(folder, ".".join(nearest)):
            return ".".join(nearest)
    return None


def describe(value: object) -> str:
    """Return how the `repr` of `value` starts, and its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, of type {type(value).__name__}"
