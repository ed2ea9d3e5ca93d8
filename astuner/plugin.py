"""From `package.module->Name` to the class or function that it names.

A module is looked for under each search folder (the working directory, the YAML file's folder) and then among
the installed ones. A file from a search folder lives under a private root package, one for each folder, so that
two folders may hold files of one name; its imports see that folder as if it were on `sys.path`, which is left
as it is. A module that an ordinary import would take from the very same folder is imported ordinarily, so
that nobody ends up with two copies of a class.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from astuner.errors import PluginError

__all__ = ["load_class", "load_function", "raised_at"]

T = TypeVar("T")

_ROOT = "_astuner_plugin_"
_INSTALLED = Path(__file__).resolve().parents[1]
_import_folders: dict[str, tuple[Path, ...]] = {}
"""Root package to the folders that its modules import from, its own folder first."""


def load_class(path: str, base: type[T], *, search: Sequence[Path] = ()) -> type[T]:
    """Load the class that `path` names and check that it can stand in for `base`.

    Args:
        path: `package.module->Class`, or `some/file.py->Class`.
        base: the class that it must derive from.
        search: folders to look in before the installed modules, in this order.

    Returns:
        The class; the same object each time.

    Raises:
        PluginError: the path is malformed, leads nowhere, its module raises on import, or what it names is no
            concrete subclass of `base`.
    """
    found = _load(path, search)
    wanted = f"{base.__module__}.{base.__qualname__}"
    if not isinstance(found, type):
        raise PluginError(f"`{path}` is {_described(found)}; expected a class that derives from {wanted}.")
    if not issubclass(found, base):
        parents = ", ".join(_plain_name(f"{b.__module__}.{b.__qualname__}") for b in found.__bases__)
        raise PluginError(
            f"`{path}` is a class that derives from {parents}; expected one that derives from {wanted}."
            f" Write `class {found.__name__}({base.__name__}):`."
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"`{path}` does not define {', '.join(missing)}, which {wanted} leaves to its subclasses.")
    return found


def load_function(path: str, *, search: Sequence[Path] = ()) -> Callable[..., Any]:
    """Load the function that `path` names (see `load_class` for the notation and the search).

    Raises:
        PluginError: the path is malformed, leads nowhere, its module raises on import, or what it names cannot
            be called.
    """
    found = _load(path, search)
    if not callable(found):
        raise PluginError(f"`{path}` is {_described(found)}; expected a function.")
    return found


def raised_at(error: BaseException, within: Path | None = None) -> str:
    """Say where `error` was raised, as `file:line`: the innermost frame in the user's code that can be found.

    Args:
        error: a raised exception.
        within: the folder of the user's code; without it, or with no frame there, the innermost frame counts.
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_import_machinery(f.filename)]
    own = [f for f in frames if within is not None and _is_own_code(Path(f.filename), within)]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else "an unknown place"


def _is_import_machinery(filename: str) -> bool:
    return filename.startswith("<frozen importlib") or filename in (__file__, importlib.__file__)


def _is_own_code(file: Path, folder: Path) -> bool:
    # A virtual environment may lie inside the folder; what is installed there is not the user's code.
    return file.is_relative_to(folder) and "site-packages" not in file.parts


def _load(path: str, search: Sequence[Path]) -> object:
    place, arrow, name = (part.strip() for part in path.partition("->"))
    if not (place and arrow and name.isidentifier()):
        raise PluginError(
            f"{path!r} is not of the form `package.module->Name` or `some/file.py->Name`, for example"
            " `astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge`."
        )
    folders = tuple(dict.fromkeys(Path(folder).resolve() for folder in search))
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(path, place, folders) if is_file else _load_module(path, place, folders)
    try:
        return getattr(module, name)
    except AttributeError:
        raise PluginError(_no_such_name(path, module, name)) from None
    except Exception as error:  # a module with a `__getattr__` may import on demand
        raise _import_failed(path, place, error, None) from error


def _load_module(path: str, dotted: str, folders: tuple[Path, ...]) -> ModuleType:
    if not all(part.isidentifier() for part in dotted.split(".")):
        raise PluginError(f"`{path}`: {dotted!r} is not a module's name such as `package.module`.")
    if dotted.partition(".")[0] != "astuner":
        for folder in folders:
            file = _module_file(folder, dotted)
            if file is not None:
                return _import_from_folder(path, folder, dotted, file, folders)
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{dotted}.".startswith(f"{error.name}."):
            raise PluginError(_no_such_module(path, dotted, folders)) from None
        raise _import_failed(path, dotted, error, None) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(path, dotted, error, None) from error


def _load_file(path: str, place: str, folders: tuple[Path, ...]) -> ModuleType:
    given = Path(place).expanduser()
    tried = list(dict.fromkeys((folder / given).resolve() for folder in folders or (Path.cwd(),)))
    file = next((candidate for candidate in tried if candidate.is_file()), None)
    if file is None:
        places = ", ".join(str(candidate) for candidate in tried)
        names = [entry.name for c in tried if c.parent.is_dir() for entry in c.parent.glob("*.py")]
        raise PluginError(f"`{path}`: no file {places}.{_did_you_mean(given.name, names)}")
    folder = next((f for f in folders if file.is_relative_to(f)), file.parent)
    parts = file.relative_to(folder).with_suffix("").parts
    if any("." in part for part in parts):  # e.g. `.hidden/file.py`, which has no dotted name from there
        folder, parts = file.parent, (file.stem,)
    if "." in file.stem or file.suffix != ".py":
        raise PluginError(f"`{path}`: {file.name} cannot be imported; give it a name such as `my_agent.py`.")
    return _import_from_folder(path, folder, ".".join(parts), file, folders)


def _import_from_folder(path: str, folder: Path, dotted: str, file: Path, folders: tuple[Path, ...]) -> ModuleType:
    """Import `file`, which is module `dotted` of `folder`."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == file:
        return main  # a script that names its own class must not run a second time
    for each in dict.fromkeys((folder, *folders)):
        _import_folders[_root_package(each)] = tuple(dict.fromkeys((each, folder, *folders)))
    ordinary = folder in _ordinary_places(dotted.partition(".")[0])
    importlib.invalidate_caches()  # the file may be younger than the last look at its folder
    try:
        return importlib.import_module(dotted if ordinary else f"{_root_package(folder)}.{dotted}")
    except (Exception, SystemExit) as error:
        raise _import_failed(path, str(file), error, folder) from error


def _module_file(folder: Path, dotted: str) -> Path | None:
    base = folder.joinpath(*dotted.split("."))
    files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _ordinary_places(top: str) -> list[Path]:
    """Folders that an ordinary import would take the top-level module `top` from."""
    try:
        spec = find_spec(top)
    except ValueError:  # a module without a spec, such as one made by hand
        return []
    if spec is None:
        return []
    inside = list(spec.submodule_search_locations or ()) or ([spec.origin] if spec.origin else [])
    return [Path(place).resolve().parent for place in inside]


def _root_package(folder: Path) -> str:
    """Name of the package that stands for `folder`; made on first use."""
    name = _ROOT + blake2b(str(folder).encode(), digest_size=6).hexdigest()
    if name not in sys.modules:
        package = ModuleType(name, f"Modules of {folder}.")
        package.__path__ = [str(folder)]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules.setdefault(name, package)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return name


class _FolderFinder(MetaPathFinder):
    """Finds the modules of root packages, and gives them a loader that knows their folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_ROOT):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FolderLoader(fullname, spec.loader.path)
        return spec


_FINDER = _FolderFinder()


class _FolderLoader(SourceFileLoader):
    """Runs a module with an `__import__` of its own: absolute imports look into the module's folders first.

    Python looks `__import__` up in the module's `__builtins__` for each import statement, at load time and later
    inside functions. Neither `sys.path` nor a finder could tell two folders apart, for both know only the
    imported name and not who asks.
    """

    def exec_module(self, module: ModuleType) -> None:
        root = module.__name__.partition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer(root)}
        super().exec_module(module)


def _importer(root: str) -> Callable[..., ModuleType]:
    """Make the `__import__` of the modules of package `root`; the arguments are those of `builtins.__import__`."""

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        wanted = [name] if "." in name else [f"{name}.{each}" for each in fromlist or ()]
        home = None if level else next((f for f in _import_folders[root] if _imports_from(f, top, wanted)), None)
        if home is None:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        package = _root_package(home)
        module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist or (), 0)
        return module if fromlist else sys.modules[f"{package}.{top}"]

    return import_


def _imports_from(folder: Path, top: str, wanted: Sequence[str]) -> bool:
    """Whether a module of `folder` that imports `wanted` modules of `top` means `folder`'s own ones."""
    if top in sys.stdlib_module_names or top == "astuner":
        return False
    if _module_file(folder, top) is not None:
        return folder not in _ordinary_places(top)
    # Python's own rule: a folder without `__init__.py` yields to any real module of that name, and shares the name
    # with another such folder (an installed package may well bring a `tutorial` or an `examples`).
    if not (folder / top).is_dir() or _is_real_module(top):
        return False
    ordinary = _ordinary_places(top)
    return not ordinary or (folder not in ordinary and any(_has_module(folder, dotted) for dotted in wanted))


def _is_real_module(top: str) -> bool:
    try:
        spec = find_spec(top)
    except ValueError:  # one made by hand
        return True
    return spec is not None and spec.origin is not None


def _has_module(folder: Path, dotted: str) -> bool:
    return _module_file(folder, dotted) is not None or folder.joinpath(*dotted.split(".")).is_dir()


def _import_failed(path: str, what: str, error: BaseException, folder: Path | None) -> PluginError:
    reason = _plain_name(f"{type(error).__name__}: {error}")
    return PluginError(f"`{path}`: importing {what} raised {reason} (at {raised_at(error, folder)}).")


def _no_such_module(path: str, dotted: str, folders: tuple[Path, ...]) -> str:
    file = f"{dotted.replace('.', '/')}.py"
    looked = f"no {file} in {', '.join(map(str, folders))}, and " if folders else ""
    near = _near_module(dotted, folders)
    hint = f" Did you mean `{near}`?" if near else " Give a module's name, or the path of a .py file."
    return f"`{path}`: {looked}no installed module {dotted}.{hint}"


def _near_module(dotted: str, folders: tuple[Path, ...]) -> str | None:
    """The existing module whose dotted name is nearest, part by part."""
    for folder in (*folders, *_ordinary_places(dotted.partition(".")[0]), _INSTALLED):
        near: list[str] = []
        for part in dotted.split("."):
            here = folder.joinpath(*near)
            names = [e.stem for e in here.iterdir() if e.suffix == ".py" or e.is_dir()] if here.is_dir() else []
            near += [part] if part in names else get_close_matches(part, names, 1)
        if near and near != dotted.split(".") and _module_file(folder, ".".join(near)):
            return ".".join(near)
    return None


def _no_such_name(path: str, module: ModuleType, name: str) -> str:
    names = [n for n in dir(module) if not n.startswith("_")]
    own = [n for n in names if getattr(getattr(module, n, None), "__module__", None) == module.__name__]
    has = f" It defines {', '.join(own[:10])}." if own else ""
    return f"`{path}`: {module.__file__ or module.__name__} has no {name}.{_did_you_mean(name, names) or has}"


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _described(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, of type {type(value).__name__}"


def _plain_name(text: str) -> str:
    """`text` without the names of root packages, which mean nothing to the reader."""
    return re.sub(rf"{_ROOT}[0-9a-f]+\.", "", text)
