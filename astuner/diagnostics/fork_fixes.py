"""Suggestions against forks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from astuner.schema import ForkCause

_FIXES: Mapping[str, str] = {
    "template_rewrote_history": (
        "the chat template renders earlier answers differently once another message follows (the templates of Qwen3 "
        "and DeepSeek-R1 drop earlier thinking); set model.renderer: {name: qwen3, thinking_retention: all}, with the "
        "name of your model's renderer, or default for a model without one"
    ),
    "framework_edited_history": (
        "the agent changed or cut an earlier message; make it send the earlier request and the unchanged answer, "
        "followed by new messages (the usual reason is an agent memory that compresses or trims)"
    ),
    "tools_changed": (
        "the conversation continued with different tools; register all tools before the first call and do not change "
        "them, or hide tools from the model with rollout.agentscope_disable_toolcalls: true"
    ),
    "system_changed": (
        "the first message of the conversation changed; keep the system message the same for the whole episode, and "
        "put changing content (time, notes, state) into a user message"
    ),
    "retokenised_by_client": (
        "an answer came back in a different form (trimmed, or with thinking or tool calls written into the text); make "
        "the agent append the answer's message unchanged: answer.call.messages[-1]"
    ),
    "truncated": (
        "messages were removed from the history, or an answer was cut inside its thinking or its tool calls; keep the "
        "whole history, or raise rollout.max_response_length_in_one_turn and rollout.max_model_len"
    ),
    "history_compressed": (
        "the agent loop replaced the history with a summary; raise context_tracker.max_env_len for fewer summaries, or "
        "set context_tracker.context_tracker_type: linear for none"
    ),
    "window_moved": (
        "the agent loop left out the oldest turns; raise context_tracker.sliding_window_cm.turns, or set "
        "context_tracker.context_tracker_type: linear to keep all turns"
    ),
    "thinking_dropped": (
        "the agent loop left out the thinking of earlier turns; raise context_tracker.linear_think_cm.keep_turns, or "
        "set context_tracker.context_tracker_type: linear to keep all thinking"
    ),
}


def fix_for(cause: str) -> str:
    """Return the meaning of a fork's cause and what to try against it, in one sentence."""
    unknown = "this version of astuner does not know the cause; use the version that wrote the record"
    return _FIXES.get(cause, unknown)


def fixes_for(causes: Iterable[str]) -> dict[str, str]:
    """Return the fixes by cause, in the order of `ForkCause`; unknown causes come last."""
    order = get_args(ForkCause)
    ordered = sorted(set(causes), key=lambda cause: (order.index(cause) if cause in order else len(order), cause))
    return {cause: fix_for(cause) for cause in ordered}
