"""Section `workflow`: a program that is the agent."""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from astuner.config.section import PositiveInt, Section, key
from astuner.config.services import EnvValue

PLACEHOLDER = re.compile(r"\{(main_query|task_id|base_url|api_key|model|metadata\.[\w-]+)\}")
"""A placeholder in `command`, `files` and `env`, which is replaced with a value of the episode."""
_NAMES = ("main_query", "task_id", "base_url", "api_key", "model", "metadata")
_EXAMPLE = "expected a list with one item per word, such as [python, my_agent.py]"


def _words(command: object) -> object:
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError:
            words = []
        raise ValueError(f"{_EXAMPLE}; write [{', '.join(words)}]" if words else _EXAMPLE)
    if isinstance(command, list) and not command:
        raise ValueError(_EXAMPLE)
    return command


def _template(text: str) -> str:
    if "\0" in text:
        raise ValueError("expected a text without the character NUL")
    for name in re.findall(r"(?<!\$)\{([a-z_]+(?:\.[\w-]+)?)\}", text):
        if PLACEHOLDER.fullmatch(f"{{{name}}}"):
            continue
        near = get_close_matches(name.partition(".")[0], _NAMES, 1, 0.8)
        if near or name in ("query", "task", "prompt"):
            meant = (near or ["main_query"])[0]
            example = "metadata.NAME" if meant == "metadata" else meant
            raise ValueError(f"there is no placeholder {{{name}}}; did you mean {{{example}}}?")
    return text


def _program(words: list[str]) -> list[str]:
    if not words or not words[0].strip():
        raise ValueError(f"{_EXAMPLE}; its first word is empty")
    return words


def _variable(name: str) -> str:
    if not name or set(name) & {"=", "\0"}:
        raise ValueError("expected the name of an environment variable, such as HF_TOKEN")
    return name


Template = Annotated[EnvValue, AfterValidator(_template)]
"""A text with placeholders."""
VariableName = Annotated[str, AfterValidator(_variable)]
AgentText = Annotated[str, Field(min_length=1)]


class WorkflowConfig(Section):
    """`workflow`: a program that is the agent, instead of `rollout.agentscope_workflow`."""

    command: Annotated[list[Template], BeforeValidator(_words), AfterValidator(_program)] | None = None
    """The command line, a list with one item per word; it runs once per episode, without a shell."""
    files: list[Template] = key([])
    """Files and folders that are copied to the working folder of each episode."""
    env: dict[VariableName, Template] = key({})
    """Environment variables of the program, in addition to those that astuner sets."""
    pass_env: list[VariableName] = key([])
    """Environment variables of the run that the program receives in addition, such as a token or HOME."""
    visible_metadata: list[str] | None = None
    """Keys of the task's metadata that the program receives; null passes all."""
    agents: dict[str, AgentText] = key({})
    """Names of the program's agents, each with a text in the agent's system prompt or last user message."""
    max_output_bytes: PositiveInt = key(65536, resume="any")
    """Maximum size of the recorded stdout and of the recorded stderr, in bytes; the middle is left out."""
