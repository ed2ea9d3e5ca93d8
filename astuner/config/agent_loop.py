"""Section `context_tracker`: the history of the built-in agent loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from astuner.config.conditions import NOT_AUTO_CONTEXT, NOT_LINEAR_THINK, NOT_SLIDING_WINDOW, OWN_SUMMARIES
from astuner.config.section import INT_MAX, PositiveInt, Section, key

SUMMARY_TARGET = "context_tracker.alien_llm_model"
"""The target of the calls that summarise a history with another model than the one in training."""

NonNegative = Annotated[int, Field(ge=0, le=INT_MAX)]


def _address(url: str | None) -> str | None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError("expected an address such as http://127.0.0.1:8000/v1")
    return url


class AutoContextConfig(Section):
    """`context_tracker.auto_context_cm`: a history that is replaced with a summary when it is too long."""

    base_url: Annotated[str | None, AfterValidator(_address)] = key(None, resume="any")
    """The OpenAI-compatible endpoint of alien_llm_model; null has the agent's own model write the summaries."""
    api_key_env: str | None = key(None, no_effect=(OWN_SUMMARIES,), resume="any")
    """The environment variable with the endpoint's API key; null if it needs none."""
    keep_turns: NonNegative = 0
    """Number of last turns that remain after the summary."""
    prompt: Annotated[str, Field(min_length=1)] = (
        "Summarize the steps so far for yourself: what you know about the environment, what you have tried, and what "
        "remains to do. You will continue with this summary and without the steps."
    )
    """The request for a summary."""


class SlidingWindowConfig(Section):
    """`context_tracker.sliding_window_cm`: a history of the last turns."""

    turns: NonNegative = 4
    """Number of last turns (observation and answer) that the model sees, in addition to the current observation."""


class LinearThinkConfig(Section):
    """`context_tracker.linear_think_cm`: a history without earlier thinking."""

    keep_turns: NonNegative = 0
    """Number of last turns whose thinking remains."""


class ContextTrackerConfig(Section):
    """`context_tracker`: the history of the built-in agent loop (rollout.use_agentscope_protocol: False)."""

    context_tracker_type: Literal["linear", "sliding_window", "linear_think", "auto_context"] = "linear"
    """What the model sees: all turns; the last turns; no earlier thinking; or a summary of a long history."""
    alien_llm_model: str = key("qwen3-235b-a22b-instruct-2507", no_effect=(NOT_AUTO_CONTEXT, OWN_SUMMARIES))
    """The model that writes the summaries, at auto_context_cm.base_url."""
    alien_llm_response_length: PositiveInt = key(512, no_effect=(NOT_AUTO_CONTEXT,))
    """Maximum number of tokens of a summary."""
    max_env_len: PositiveInt = key(4096, no_effect=(NOT_AUTO_CONTEXT,))
    """Number of tokens of a prompt above which auto_context summarizes the history."""
    auto_context_cm: AutoContextConfig = key(AutoContextConfig(), no_effect=(NOT_AUTO_CONTEXT,))
    """Used if context_tracker_type is auto_context."""
    sliding_window_cm: SlidingWindowConfig = key(SlidingWindowConfig(), no_effect=(NOT_SLIDING_WINDOW,))
    """Used if context_tracker_type is sliding_window."""
    linear_think_cm: LinearThinkConfig = key(LinearThinkConfig(), no_effect=(NOT_LINEAR_THINK,))
    """Used if context_tracker_type is linear_think."""
