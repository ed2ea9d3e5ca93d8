"""Why LLM calls do not extend the calls that they continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ForkCause = Literal[
    "template_rewrote_history",
    "framework_edited_history",
    "tools_changed",
    "system_changed",
    "retokenised_by_client",
    "truncated",
    "history_compressed",
    "window_moved",
    "thinking_dropped",
]
"""Why a request does not extend the call that it continues.

`template_rewrote_history`: the messages are the same, but the chat template renders earlier turns differently when
    later ones follow (for example without their thinking), or it cannot be shown that it keeps their tokens.
`framework_edited_history`: a message before the last answer differs from the earlier call, was inserted, or is an
    answer that the model never gave.
`tools_changed`: the messages are the same, but the tools differ.
`system_changed`: the system message was changed, added or removed; the rest of the conversation is the same.
`retokenised_by_client`: an answer has the content that the model sampled, apart from white space, but in another form:
    trimmed, with thinking or tool calls in the text, or with text converted to tool calls. It is therefore rendered to
    other tokens than were sampled. (Other ids or another spacing of a tool call's JSON do not count as another form.)
`truncated`: messages of the earlier conversation were left out and the others are unchanged (for example the oldest
    turns, to fit the context); or the earlier answer was cut by `max_tokens` within thinking or a list of tool calls,
    whose end was never sampled, so that the template cannot continue its tokens. (An answer that was cut within its
    text can be continued: the end of turn that the template adds is context and is not trained.)
`history_compressed`, `window_moved`, `thinking_dropped`: the built-in agent loop replaced the history with a summary,
    left out the oldest turns, or left out the thinking of an earlier answer (see `context_tracker`).
"""


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a call does not extend an earlier call that it should have extended.

    Attributes:
        cause: the cause.
        call_id: the id of the earlier call.
        position: index of the first token at which the prompt differs from the earlier call's prompt + completion.
        expected_ids, found_ids: the first few ids from `position` on, of the earlier call and of the prompt.
        expected, found: the texts of these ids.
        message_index: index of the first message that differs from the earlier call; if the messages are the same, of
            the message that `position` is in.
    """

    cause: ForkCause
    call_id: str
    position: int
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    expected: str
    found: str
    message_index: int
