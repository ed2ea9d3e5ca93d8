"""A request of the scheduler, and the grammar that limits its next tokens."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.errors import ModelError, UnsupportedParameterError
from astuner.llm_engine.stop_strings import StopStrings
from astuner.schema import Completion, FinishReason, OutputConstraint, SamplingParams


class GrammarMatcher:
    """The state of one completion in a grammar.

    Args:
        matcher: a matcher of llguidance.
        vocab_size: the number of the model's tokens.

    Attributes:
        failure: why the grammar can no longer be followed; None if it can.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.failure: str | None = None

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocabulary]; all if the grammar has failed (see `failure`)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if self._matcher.is_error() or not known.any():
            self.failure = self._matcher.get_error() or "no token fits"
            return np.ones(self._vocab_size, np.bool_)
        return np.pad(known, (0, self._vocab_size - len(known)))

    def accept(self, token_id: int) -> None:
        """Append a token, which must be an allowed one."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether no token but an end token can follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Thread-safe.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: the number of the model's tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._by_ends: dict[tuple[int, ...], Any] = {}

    def matcher(self, constraint: OutputConstraint, end_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher at the beginning of a constraint's text.

        Args:
            end_ids: the tokens that may end a complete text.

        Raises:
            UnsupportedParameterError: the grammar is invalid or not supported, or llguidance is not installed.
        """
        name = constraint.parameter
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise UnsupportedParameterError(
                f"{name} needs the package llguidance, which is not installed: pip install 'astuner[constrained]', or "
                f"leave {name} out",
                name,
            ) from error
        matcher = LLMatcher(self._tokenizer_for(tuple(end_ids), name), constraint.grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().partition("\n")[0]
            raise UnsupportedParameterError(
                f"{name} cannot be enforced: {reason}. Use a JSON schema without this feature, or leave {name} out",
                name,
            )
        return GrammarMatcher(matcher, self._vocab_size)

    def _tokenizer_for(self, end_ids: tuple[int, ...], name: str) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if end_ids not in self._by_ends:
                try:
                    ends = list(end_ids) or None
                    self._by_ends[end_ids] = from_tokenizer(self._tokenizer, self._vocab_size, eos_token=ends)
                except ValueError as error:
                    raise UnsupportedParameterError(
                        f"{name} cannot be enforced with this model's tokenizer: {error}. Leave {name} out", name
                    ) from error
            return self._by_ends[end_ids]


TopLogprobs = tuple[tuple[int, float], ...]
"""The ids and logprobs of the most likely tokens at a position."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was sampled for a request.

    Attributes:
        logprob: as defined by `Completion.logprobs`; NaN if logits are not finite.
        top_logprobs: the most likely tokens; None unless the request asks for them.
        sampler_logprob: as defined by `Completion.sampler_logprobs`; None if it is `logprob`.
    """

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs | None = None
    sampler_logprob: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, the tokens sampled so far, and a callback for the result.

    Attributes:
        tokens: prompt ids followed by sampled ids.
        prompt_len: number of prompt ids in `tokens`.
        max_len: length of `tokens` at which the request ends.
        deliver: called exactly once, in the scheduler's thread, with the completion or the error.
        stops: the strings of `params.stop`; None without any, or without a tokenizer.
        grammar: the state in the grammar of `params.constraint`; None without one.
        logprobs: one logprob per sampled id.
        top_logprobs: for each sampled id, the ids and logprobs of the most likely tokens; empty unless requested.
        sampler_logprobs: one per sampled id, see `Completion.sampler_logprobs`; empty if they equal `logprobs`.
        key: 64-bit key of the request's random stream.
        stop_ids: `params.stop_token_ids` as a set.
    """

    tokens: list[int]
    prompt_len: int
    max_len: int
    params: SamplingParams
    deliver: Callable[[Completion | ModelError], None]
    stops: StopStrings | None = None
    grammar: GrammarMatcher | None = None
    logprobs: list[float] = field(default_factory=list, init=False)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list, init=False)
    sampler_logprobs: list[float] = field(default_factory=list, init=False)
    key: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = draw_key(self.params.seed)
        self.stop_ids = frozenset(self.params.stop_token_ids)

    def append(self, sampled: SampledToken) -> None:
        """Append a sampled token."""
        self.tokens.append(sampled.token_id)
        self.logprobs.append(sampled.logprob)
        if sampled.top_logprobs is not None:
            self.top_logprobs.append(sampled.top_logprobs)
        if sampled.sampler_logprob is not None:
            self.sampler_logprobs.append(sampled.sampler_logprob)
        if self.grammar is not None and self.grammar.failure is None:
            self.grammar.accept(sampled.token_id)

    def completion(self, reason: FinishReason, policy_version: int) -> Completion:
        """Return the completion of the request, which has ended."""
        sampled = tuple(self.tokens[self.prompt_len :])
        return Completion(
            sampled,
            tuple(self.logprobs),
            reason,
            policy_version,
            tuple(self.top_logprobs),
            tuple(self.sampler_logprobs),
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the request ends at its last token, or None if it continues."""
        if self.logprobs and self.tokens[-1] in self.stop_ids:
            return "stop"
        if self.stops is not None and self.logprobs:
            start = max(self.prompt_len, len(self.tokens) - self.stops.window)
            if self.stops.ends(self.tokens[start:]):
                return "stop"
        if self.grammar is not None and not self.stop_ids and self.grammar.is_complete:
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None


def draw_key(seed: int | None) -> int:
    """Return a 64-bit key: a hash of `seed`, or a random number from the system if it is None."""
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
