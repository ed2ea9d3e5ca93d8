"""What to try against forks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from astuner.schema import ForkCause

_FIXES: Mapping[str, str] = {
    "template_rewrote_history": (
        "the chat template writes earlier answers anew once another message follows (Qwen3's template drops earlier "
        "thinking); set model.renderer: {name: qwen3, thinking_retention: all}, with the name of your model's renderer "
        "(renderer default has no such option)"
    ),
    "framework_edited_history": (
        "the agent changed or cut an earlier message; let it send the earlier request and the answer as it got it, "
        "with new messages behind them (an agent's memory that compresses or trims is the usual reason)"
    ),
    "tools_changed": (
        "the same conversation went on with other tools; register all tools before the first call and leave them as "
        "they are, or show the model none with rollout.agentscope_disable_toolcalls: true"
    ),
    "system_changed": (
        "the conversation went on under another first message; keep the system message the same for a whole episode "
        "and put what changes (time, notes, state) into a user message"
    ),
    "retokenised_by_client": (
        "an answer came back in another form than the agent got it (trimmed, thinking or tool calls written into the "
        "text); let the agent append the answer's message as it is, answer.call.messages[-1]"
    ),
    "truncated": (
        "messages were left out of the history, or an answer was cut inside its thinking or its tool calls; keep the "
        "whole history, or raise rollout.max_response_length_in_one_turn and rollout.max_model_len"
    ),
}


def fix_for(cause: str) -> str:
    """Return what a fork of that cause means and what to try, one sentence."""
    return _FIXES.get(cause, "a cause that this version of astuner does not know; use the one that wrote the record")


def fixes_for(causes: Iterable[str]) -> dict[str, str]:
    """Return the fixes by cause, in the order of `ForkCause`."""
    wanted = set(causes)
    order = [cause for cause in get_args(ForkCause) if cause in wanted]
    return {cause: fix_for(cause) for cause in [*order, *sorted(wanted - set(order))]}
