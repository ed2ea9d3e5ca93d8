"""Sampling parameters, completions, and why LLM calls do not extend the calls that they continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = Mapping[str, Any]
"""A chat message in OpenAI's format: `role`, `content`, and optionally `tool_calls`, `tool_call_id` or `name`."""
Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]
"""Tool definitions in OpenAI's format."""
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A grammar that the text of a completion follows.

    Attributes:
        parameter: the parameter of the request that demands it: `response_format` or `tool_choice`.
        grammar: the grammar, in llguidance's variant of Lark.
        json_schema: the JSON schema of the whole text, as JSON; None if the text is more than one JSON value.
    """

    parameter: str
    grammar: str
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one completion.

    Attributes:
        temperature: 0 for greedy decoding.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely tokens; -1 for all.
        max_tokens: the maximum number of generated tokens, including the stop token.
        stop_token_ids: generation ends after any of these tokens, which the completion includes.
        seed: makes this request's sampling reproducible, regardless of other requests in its batch.
        stop: generation ends after the token that completes any of these strings. All tokens are part of the
            completion. Engines without a tokenizer ignore it, so the caller drops the tokens after the string.
        presence_penalty: subtracted from the logits of the tokens that the completion already has.
        frequency_penalty: subtracted from these logits once per occurrence.
        top_logprobs: the number of most likely tokens to return for each token.
        constraint: a grammar for the text; None for any text.
        weights: the policy's or the starting model's, for engines that have both.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    constraint: OutputConstraint | None = None
    weights: Literal["policy", "starting_model"] = "policy"


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one prompt.

    Attributes:
        token_ids: the sampled ids, including the stop token if one was sampled.
        logprobs: the natural-log probability of each token under the temperature-scaled distribution (for greedy
            decoding, the unscaled one), without top-p, top-k, penalties and constraints, so that a trainer can
            recompute them.
        finish_reason: `stop` if a stop token or a stop string was sampled, else `length`.
        policy_version: the version of the weights that sampled it.
        top_logprobs: for each token, the ids and logprobs of the most likely tokens at its position, most likely first;
            empty unless they were requested.
        sampler_logprobs: the natural-log probability of each token under the distribution that it was sampled from,
            after top-p, top-k, penalties and constraints; empty if it equals `logprobs`, or if the engine does not
            return it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    sampler_logprobs: tuple[float, ...] = ()


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
        expected_ids, found_ids: the first few ids from `position` on, in the earlier call and in the prompt.
        expected, found: the texts for these ids.
        message_index: index of the first message that differs from the earlier call; if the messages are the same, the
            message that `position` is in.
    """

    cause: ForkCause
    call_id: str
    position: int
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    expected: str
    found: str
    message_index: int
