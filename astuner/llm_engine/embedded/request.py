"""A request of the scheduler."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from astuner.errors import ModelError
from astuner.schema import Completion, FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, the tokens sampled so far, and a callback for the result.

    Attributes:
        tokens: prompt ids followed by sampled ids.
        prompt_len: number of prompt ids in `tokens`.
        max_len: length of `tokens` at which the request ends.
        params: sampling parameters.
        deliver: called exactly once, in the scheduler's thread, with the completion or the error.
        stops: called in the scheduler's thread after each sampled id, with all sampled ids; True ends the request.
        logprobs: one logprob per sampled id.
        key: 64-bit key of the request's random stream.
        stop_ids: `params.stop_token_ids` as a set.
    """

    tokens: list[int]
    prompt_len: int
    max_len: int
    params: SamplingParams
    deliver: Callable[[Completion | ModelError], None]
    stops: Callable[[Sequence[int]], bool] | None = None
    logprobs: list[float] = field(default_factory=list, init=False)
    key: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = draw_key(self.params.seed)
        self.stop_ids = frozenset(self.params.stop_token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the request ends at its last token, or None if it continues."""
        if self.logprobs and self.tokens[-1] in self.stop_ids:
            return "stop"
        if self.stops is not None and self.logprobs and self.stops(self.tokens[self.prompt_len :]):
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None


def draw_key(seed: int | None) -> int:
    """Return a 64-bit key: a hash of `seed`, or a random number of the system if it is None."""
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
