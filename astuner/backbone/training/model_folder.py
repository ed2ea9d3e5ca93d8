"""The folder of the model that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from astuner.errors import AstunerError, ModelError, did_you_mean
from astuner.plugin import load_function, raised_at

_RECORDS = "launcher_record"


def model_path(path: str, key: str, search: Sequence[Path]) -> str:
    """Return the folder or Hugging Face name of a model.

    Args:
        path: a folder, a Hugging Face name, or `package.module->function`, a function that returns a folder.
        key: the configuration key or option that has `path`, for messages.
        search: folders in which relative paths are searched.

    Raises:
        ModelError: a local path does not exist, or contains no model.
        PluginError: the function cannot be loaded.
    """
    if "->" in path:
        return str(_checked_folder(_call_folder_function(path, search), f"{path} returned"))
    local = local_model(path, key, search)
    if local is None:
        logger.info("{} {!r} is not a local folder; loading it from Hugging Face", key, path)
        return path
    relative = Path(path).expanduser()
    return str(relative) if (Path.cwd() / relative).exists() else str(local)


def local_model(path: str, key: str, search: Sequence[Path]) -> Path | None:
    """Return the folder of a model; None for a name of Hugging Face. The arguments are those of `model_path`.

    Raises:
        ModelError: a local path does not exist, or contains no model.
    """
    relative = Path(path).expanduser()
    local = next((match for folder in search if (match := folder / relative).exists()), None)
    if local is not None:
        return _checked_folder(local, f"{key} is")
    # The name of a model on Hugging Face has at most one slash.
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/"):
        raise ModelError(f"{key} is {path!r}, which does not exist; {_folder_hint(relative, search)}")
    if relative.parts[0] == _RECORDS or any(_has_records(folder / relative.parts[0]) for folder in search):
        raise ModelError(
            f"{key} is {path!r}, which does not exist: no run of this name has started here; `astuner runs` lists the "
            f"runs{_near_model(relative, search)}"
        )
    return None


def _call_folder_function(path: str, search: Sequence[Path]) -> Path:
    function = load_function(path, search=search)
    try:
        return Path(function())
    except AstunerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"model.path {path!r} did not return a folder: {type(error).__name__}: {error} (at {raised_at(error)})"
        ) from error


def _folder_hint(path: Path, search: Sequence[Path]) -> str:
    """Return the end of an error message: the expected folder, and a folder with a similar name."""
    parents = [parent for folder in search if (parent := (folder / path).parent).is_dir()]
    names = [entry.name for parent in parents for entry in parent.iterdir() if entry.is_dir()]
    if near := _near_model(path, search):
        return f"a folder in transformers' format is expected{near}"
    hint = did_you_mean(path.name, names, "; did you mean {}?", show=lambda name: repr(str(path.with_name(name))))
    return f"a folder in transformers' format is expected{hint}"


def _near_model(path: Path, search: Sequence[Path]) -> str:
    """Return a question with the model of a run, for a path near it: RUN, RUN/models, RUN/model/step_10; or ""."""
    for folder in search:
        for near in (folder / path, *(folder / path).parents[:3]):
            if near != folder and (near / "model/config.json").exists():
                return f"; did you mean {str(near / 'model')!r}?"
    return ""


def _has_records(folder: Path) -> bool:
    return next(folder.glob("*/environment.json"), None) is not None


def _checked_folder(folder: Path, subject: str) -> Path:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{subject} {str(folder)!r}, which {kind}; a folder in transformers' format is expected")
    if not (folder / "config.json").exists():
        if (folder / "environment.json").exists() and not (folder / "model/config.json").exists():
            checkpoints = sorted(folder.glob("checkpoints/step_*/model/config.json"))
            hint = f"; its last checkpoint has {str(checkpoints[-1].parent)!r}" if checkpoints else ""
            raise ModelError(
                f"{subject} {str(folder)!r}, a run that has not finished: its tuned model is written at the end{hint}"
            )
        contents = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        inside = next((name for name in ("model", "merged_model") if (folder / name / "config.json").exists()), None)
        hint = f"; did you mean {str(folder / inside)!r}?" if inside else ""
        raise ModelError(
            f"{subject} {str(folder)!r}, which is not a model: it has no config.json but contains {contents}{hint}"
        )
    return folder
