"""A program's inputs: the task, the model's address, and the run's variables that hold no secret."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astuner.config.workflow import PLACEHOLDER, WorkflowConfig
from astuner.errors import WorkflowError, short_repr
from astuner.model_tuner import OpenAiEndpoint
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Task, WorkflowTask
from astuner.system.redaction import secrets_in

# The kernel accepts at most 128 KiB per variable and per argument.
_MAX_VARIABLE_BYTES = 120 * 2**10
_OWN_VARIABLES = ("HOME", "TMPDIR", "PWD", "OLDPWD")
_FOREIGN_PREFIXES = ("OPENAI_", "ANTHROPIC_", "AZURE_OPENAI_", "XDG_", "ASTUNER_")


@dataclass(frozen=True, slots=True)
class EpisodeValues:
    """An episode's values for the placeholders and for the program's environment.

    Attributes:
        task: the task of the episode.
        config: section `workflow` of the configuration.
        endpoint: the address and the key of the model.
        model: the name of the model.
    """

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
        """Return the environment of the program: that of the run without secrets, and the episode's variables."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in self.config.pass_env
            or not (name in _OWN_VARIABLES or name.startswith(_FOREIGN_PREFIXES) or secrets_in({name: value}))
        }
        # The folder of the run's interpreter comes last, so `python` is found even if no environment is activated.
        path = os.pathsep.join(filter(None, (inherited.get("PATH"), str(Path(sys.executable).parent))))
        own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PWD": str(folder / "work"), "PATH": path}
        task = _to_json(self._task(workflow_task))
        (folder / "task.json").write_text(task)
        # Requests to the model must not go to a proxy.
        hosts = dict.fromkeys(("127.0.0.1", "localhost", urlsplit(self.endpoint.base_url).hostname or ""))
        for name in ("NO_PROXY", "no_proxy"):
            own[name] = ",".join(filter(None, (inherited.get(name), *hosts)))
        own |= {
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
            own["TASK_JSON"] = task
        passed = {name: os.environ[name] for name in self.config.pass_env if name in os.environ}
        return inherited | own | passed | {name: self.fill(text) for name, text in self.config.env.items()}

    def _task(self, workflow_task: WorkflowTask) -> dict[str, Any]:
        task = workflow_task.task
        return {
            "task_id": task.task_id,
            "main_query": task.main_query,
            "init_messages": list(task.init_messages),
            "metadata": self.metadata,
            "env_type": task.env_type,
            "episode_id": workflow_task.episode_id,
            "seed": workflow_task.seed,
            "is_validation": workflow_task.is_validation,
        }


def _to_json(value: object) -> str:
    """Return a value as JSON; a field of a data set may be a date, for example, which becomes a text."""
    return json.dumps(to_jsonable(value, lambda text: text))
