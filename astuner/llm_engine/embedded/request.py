"""One request on its way through the scheduler."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from astuner.errors import ModelError
from astuner.schema import Completion, FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what was sampled after it so far, and where the answer goes.

    Attributes:
        tokens: prompt ids, then sampled ids.
        prompt_len: how many of `tokens` are the prompt.
        max_len: the request ends when `tokens` has this length.
        params: how to sample.
        deliver: called exactly once, by the thread that runs the scheduler, with the completion or the error.
        stops: asked by that thread after each sampled id, with all that were sampled; True ends the request there.
        logprobs: one a sampled id.
        key: 64 bits that decide the request's random draws.
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
        """Why the request ends here, or None while it goes on."""
        if self.logprobs and self.tokens[-1] in self.stop_ids:
            return "stop"
        if self.stops is not None and self.logprobs and self.stops(self.tokens[self.prompt_len :]):
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None


def draw_key(seed: int | None) -> int:
    """64 bits from `seed`, well spread over neighbouring seeds; fresh ones from the system where it is None."""
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
