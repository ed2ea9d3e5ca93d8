"""The program of section `workflow`: its command line, the project's files, and its inputs in an episode."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astuner.config.workflow import PLACEHOLDER, WorkflowConfig
from astuner.errors import ConfigError, WorkflowError, short_repr
from astuner.model_tuner.framework_adapters import OpenAiEndpoint
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Task, WorkflowTask
from astuner.system.localhost import bypass_proxies
from astuner.system.redaction.redactor import secrets_in

# The kernel accepts at most 128 KiB per variable and per argument.
_MAX_VARIABLE_BYTES = 120 * 2**10
_OWN_VARIABLES = ("HOME", "TMPDIR", "PWD", "OLDPWD")
_FOREIGN_PREFIXES = ("OPENAI_", "ANTHROPIC_", "AZURE_OPENAI_", "XDG_", "ASTUNER_")


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """The program of section `workflow`, after its checks.

    Attributes:
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
        for index, word in enumerate(words[1:], 1):
            path = Path(word)
            is_copied = any(path.is_relative_to(copy) for copy in copied if copy.parts)
            if not (path.is_absolute() or is_copied) and ("/" in word or path.suffix):
                source = _source(word, search)
                if source is not None and source.is_file():
                    words[index] = str(source)
        return cls(config, tuple(words), tuple(search), has_judge)


def _source(file: str, search: Sequence[Path]) -> Path | None:
    return next((folder / file for folder in search if (folder / file).exists()), None)


def _destination(file: str) -> Path:
    """Return where a file is copied to, relative to the working folder."""
    path = Path(file)
    if file.endswith("/"):
        return Path()
    return Path(path.name) if path.is_absolute() or ".." in path.parts else path


def copy_files(files: Sequence[str], folder: Path, search: Sequence[Path]) -> None:
    """Copy files, which are absolute or below the folders of `search`, to the working folder `folder`.

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


def _executable(word: str, config: WorkflowConfig, search: Sequence[Path]) -> str:
    """Return the absolute path of the program; `ConfigError` if there is no such file, or it cannot be executed."""
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


@dataclass(frozen=True, slots=True)
class EpisodeValues:
    """An episode's values for the placeholders and for the program's environment."""

    task: Task
    config: WorkflowConfig
    endpoint: OpenAiEndpoint
    model: str

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that the program may see."""
        visible = self.config.visible_metadata
        return {name: value for name, value in self.task.metadata.items() if visible is None or name in visible}

    def fill(self, template: str) -> str:
        """Return a text from the configuration, filled with the episode's values.

        Raises:
            WorkflowError: the task lacks the metadata that the text names.
        """
        return PLACEHOLDER.sub(lambda match: self._value(match[1]), template)

    def _value(self, name: str) -> str:
        if not name.startswith("metadata."):
            values = {"main_query": self.task.main_query, "task_id": self.task.task_id}
            values |= {**self.endpoint._asdict(), "model": self.model}
            return values[name]
        key = name.removeprefix("metadata.")
        if key not in self.metadata:
            raise WorkflowError(
                f"the workflow section names {{{name}}}, and task {short_repr(self.task.task_id)} has no visible "
                f"metadata {key!r}; it has: {', '.join(map(str, self.metadata)) or 'none'}"
            )
        value = self.metadata[key]
        return value if isinstance(value, str) else _to_json(value)

    def environment(self, folder: Path, workflow_task: WorkflowTask) -> dict[str, str]:
        """Return the program's environment variables: the run's, without secrets, and the episode's."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in self.config.pass_env
            or not (name in _OWN_VARIABLES or name.startswith(_FOREIGN_PREFIXES) or secrets_in({name: value}))
        }
        # The folder of the run's interpreter comes last, so `python` is found even if no environment is activated.
        path = os.pathsep.join(filter(None, (inherited.get("PATH"), str(Path(sys.executable).parent))))
        variables = {
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PWD": str(folder / "work"),
            "PATH": path,
        }
        fields = {
            "task_id": self.task.task_id,
            "main_query": self.task.main_query,
            "init_messages": list(self.task.init_messages),
            "metadata": self.metadata,
            "env_type": self.task.env_type,
            "episode_id": workflow_task.episode_id,
            "seed": workflow_task.seed,
            "is_validation": workflow_task.is_validation,
        }
        task = _to_json(fields)
        (folder / "task.json").write_text(task)
        bypass_proxies(inherited, filter(None, [urlsplit(self.endpoint.base_url).hostname]))
        variables |= {
            "OPENAI_BASE_URL": self.endpoint.base_url,
            "OPENAI_API_BASE": self.endpoint.base_url,
            "OPENAI_API_KEY": self.endpoint.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.endpoint.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.endpoint.api_key,
            "ANTHROPIC_MODEL": self.model,
            "TASK_FILE": str(folder / "task.json"),
        }
        if len(task) <= _MAX_VARIABLE_BYTES:
            variables["TASK_JSON"] = task
        passed = {name: os.environ[name] for name in self.config.pass_env if name in os.environ}
        return inherited | variables | passed | {name: self.fill(text) for name, text in self.config.env.items()}


def _to_json(value: object) -> str:
    """Return a value as JSON; a field of a data set may be a date, for example, which becomes a text."""
    return json.dumps(to_jsonable(value, lambda text: text))
