"""The program of section `workflow`: its command line and the files of the project."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.config.workflow import PLACEHOLDER, WorkflowConfig
from astuner.errors import ConfigError, WorkflowError, short_repr


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """The program of section `workflow`, after its checks.

    Attributes:
        config: section `workflow` of the configuration.
        command: the command line, with the executable file and the project's files as absolute paths; it may contain
            placeholders.
        search: absolute folders that are searched for files of the project.
        has_judge: whether a judge computes the reward; otherwise, it is the last line of stdout.
    """

    config: WorkflowConfig
    command: tuple[str, ...]
    search: tuple[Path, ...]
    has_judge: bool

    @classmethod
    def of(cls, config: WorkflowConfig, search: Sequence[Path], *, has_judge: bool) -> AgentProgram:
        """Return the program of a section that has a command.

        Raises:
            ConfigError: the command cannot be executed, or a file or an environment variable does not exist.
        """
        words = list(config.command or ())
        for name in config.pass_env:
            if name not in os.environ:
                raise ConfigError(
                    f"workflow.pass_env names the environment variable {name}, which is not set; set it, or remove the "
                    "name"
                )
        for file in config.files:
            if not PLACEHOLDER.search(file) and _source(file, search) is None:
                raise ConfigError(_missing_file(file, search))
        copied = tuple(_destination(file) for file in config.files)
        if Path(words[0]) in copied:
            words[0] = f"./{Path(words[0])}"  # without a slash, it is searched for in PATH
        elif not PLACEHOLDER.search(words[0]):
            words[0] = _executable(words[0], config, search)
        arguments = (_project_file(word, search, copied) for word in words[1:])
        return cls(config, (words[0], *arguments), tuple(search), has_judge)


def _source(file: str, search: Sequence[Path]) -> Path | None:
    return next((folder / file for folder in search if (folder / file).exists()), None)


def _destination(file: str) -> Path:
    """Return where a file is copied to, relative to the working folder."""
    path = Path(file)
    if file.endswith("/"):
        return Path()
    return Path(path.name) if path.is_absolute() or ".." in path.parts else path


def copy_files(files: Sequence[str], folder: Path, search: Sequence[Path]) -> None:
    """Copy files of the project to a working folder.

    Args:
        files: paths below the folders of `search`, or absolute ones; without placeholders.
        folder: the working folder.
        search: absolute folders, which are searched in this order.

    Raises:
        WorkflowError: a file does not exist or cannot be copied.
    """
    for file in files:
        source = _source(file, search)
        if source is None:
            raise WorkflowError(_missing_file(file, search))
        target = folder / _destination(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(source, target)
        except (OSError, shutil.Error) as error:
            raise WorkflowError(f"workflow.files: {file!r} cannot be copied: {short_repr(error)}") from error


def _missing_file(file: str, search: Sequence[Path]) -> str:
    folders = " or ".join(dict.fromkeys(map(str, search)))
    return (
        f"workflow.files names {file!r}, but there is no such file or folder in {folders}; correct or remove the path"
    )


def _project_file(word: str, search: Sequence[Path], copied: Sequence[Path]) -> str:
    """Return the absolute path if a word in the command names a file of the project, else the word."""
    path = Path(word)
    is_copied = any(path.is_relative_to(copy) for copy in copied if copy.parts)
    if path.is_absolute() or is_copied or not ("/" in word or path.suffix):
        return word
    source = _source(word, search)
    return str(source) if source is not None and source.is_file() else word


def _executable(word: str, config: WorkflowConfig, search: Sequence[Path]) -> str:
    """Return the absolute path of the program.

    Raises:
        ConfigError: there is no such file, or it cannot be executed.
    """
    path = config.env.get("PATH", os.environ.get("PATH", os.defpath))
    found = shutil.which(word, path=f"{path}{os.pathsep}{Path(sys.executable).parent}") if "/" not in word else None
    source = Path(found) if found else _source(word, search)
    if source is None:
        hint = "; write each word as an item of the list" if " " in word else ""
        folders = " or ".join(dict.fromkeys(map(str, search)))
        place = f"in {folders}" if "/" in word else f"in a folder of PATH, in {folders}"
        raise ConfigError(
            f"workflow.command: there is no program {short_repr(word)} {place}; install it, or name its file{hint}"
        )
    if not source.is_file():
        raise ConfigError(f"workflow.command: {str(source)!r} is not a file; expected a program")
    if not os.access(source, os.X_OK):
        raise ConfigError(
            f"workflow.command: {str(source)!r} is not executable; run `chmod +x {shlex.quote(str(source))}`, or "
            f"start the list with its interpreter, such as [python, {word}]"
        )
    return str(source)
