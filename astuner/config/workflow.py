"""Sections on the agent: `workflow`, a program, and `context_tracker`, the history of the built-in agent loop."""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from astuner.config.section import NOT_NULL, NonNegativeInt, PositiveInt, Section, key
from astuner.config.services import ApiAddress, EnvValue

PLACEHOLDER = re.compile(r"\{(main_query|task_id|base_url|api_key|model|metadata\.[\w-]+)\}")
"""A placeholder in `command`, `files` and `env`, which is replaced with a value of the episode."""
SUMMARY_TARGET = "context_tracker.alien_llm_model"
"""The target of the calls that summarise a history with another model than the one in training."""
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
    """Maximum size of the recorded stdout and stderr, in bytes each; the middle is left out."""


class AutoContextConfig(Section):
    """`context_tracker.auto_context_cm`: a history that is replaced with a summary when it is too long."""

    chosen_by: ClassVar[str] = "base_url"

    base_url: ApiAddress | None = key(None, resume="any")
    """The OpenAI-compatible endpoint of alien_llm_model; null has the agent's own model write the summaries."""
    api_key_env: str | None = key(None, variant=NOT_NULL, resume="any")
    """The environment variable with the endpoint's API key; null if it needs none."""
    keep_turns: NonNegativeInt = 0
    """Number of last turns that remain after the summary."""
    prompt: Annotated[str, Field(min_length=1)] = (
        "Summarize the steps so far for yourself: what you know about the environment, what you have tried, and what "
        "remains to do. You will continue with this summary and without the steps."
    )
    """The request for a summary."""


class SlidingWindowConfig(Section):
    """`context_tracker.sliding_window_cm`: a history of the last turns."""

    turns: NonNegativeInt = 4
    """Number of last turns (observation and answer) that the model sees, in addition to the current observation."""


class LinearThinkConfig(Section):
    """`context_tracker.linear_think_cm`: a history without earlier thinking."""

    keep_turns: NonNegativeInt = 0
    """Number of last turns whose thinking remains."""


class ContextTrackerConfig(Section):
    """`context_tracker`: the history of the built-in agent loop (rollout.use_agentscope_protocol: False)."""

    chosen_by: ClassVar[str] = "context_tracker_type"

    context_tracker_type: Literal["linear", "sliding_window", "linear_think", "auto_context"] = "linear"
    """What the model sees: all turns; the last turns; no earlier thinking; or a summary of a long history."""
    alien_llm_model: str = key(
        "qwen3-235b-a22b-instruct-2507",
        variant="auto_context",
        no_effect=(NOT_NULL.unless("context_tracker.auto_context_cm.base_url"),),
    )
    """The model that writes the summaries, at auto_context_cm.base_url."""
    alien_llm_response_length: PositiveInt = key(512, variant="auto_context")
    """Maximum number of tokens in a summary."""
    max_env_len: PositiveInt = key(4096, variant="auto_context")
    """Number of prompt tokens above which auto_context summarizes the history."""
    auto_context_cm: AutoContextConfig = key(AutoContextConfig(), variant="auto_context")
    """Used if context_tracker_type is auto_context."""
    sliding_window_cm: SlidingWindowConfig = key(SlidingWindowConfig(), variant="sliding_window")
    """Used if context_tracker_type is sliding_window."""
    linear_think_cm: LinearThinkConfig = key(LinearThinkConfig(), variant="linear_think")
    """Used if context_tracker_type is linear_think."""
