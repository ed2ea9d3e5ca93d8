"""Sampling parameters and completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Message = Mapping[str, Any]
"""A chat message in OpenAI's format: `role`, `content`, and optionally `tool_calls`, `tool_call_id` or `name`."""
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
        stop_token_ids: generation ends after any of these tokens, which is part of the completion.
        seed: makes this request's sampling reproducible, regardless of other requests in its batch.
        stop: generation ends after the token that completes any of these strings. All tokens are part of the
            completion. Engines without a tokenizer ignore it, so the caller drops the tokens after the string.
        presence_penalty: subtracted from the logits of the tokens that the completion already has.
        frequency_penalty: subtracted from these logits once per occurrence.
        top_logprobs: the number of most likely tokens to return for each token.
        constraint: a grammar for the text; None for any text.
        weights: those of the policy or those of the starting model, for engines that have both.
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
            after top-p, top-k, penalties and constraints; empty if it is that of `logprobs`, or if the engine does not
            return it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    sampler_logprobs: tuple[float, ...] = ()
