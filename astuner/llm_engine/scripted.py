"""An engine whose answers a function decides: the stand-in for a model where a test is about something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from astuner.errors import ContextLengthError, ModelError
from astuner.schema import Completion, FinishReason, SamplingParams

DEFAULT_LOGPROB = -0.5


class ScriptedEngine:
    """Answers each prompt with what `answer` returns, cut as a real engine would cut it.

    Args:
        answer: given the prompt ids and the sampling parameters, the ids to complete with, at least one. Ids after
            the first stop token or past the token limit are cut off.
        max_model_len: the most tokens of prompt and completion together.
        logprobs: given the prompt ids and the (cut) completion ids, one logprob a completion id; by default -0.5 each.
        policy_version: what completions report; may be set anew at any time.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[int], SamplingParams], Sequence[int]],
        max_model_len: int,
        *,
        logprobs: Callable[[Sequence[int], Sequence[int]], Sequence[float]] | None = None,
        policy_version: int = 0,
    ) -> None:
        self._answer = answer
        self._logprobs = logprobs
        self._closed = False
        self.max_model_len = max_model_len
        self.policy_version = policy_version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Return the scripted completion; `finish_reason` is `length` exactly where the token limit cut it off.

        Raises:
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the engine is closed, or the script gave no token or the wrong number of logprobs.
        """
        # A real engine always suspends its caller; without this, tests would never see calls interleave.
        await asyncio.sleep(0)
        if self._closed:
            raise ModelError("the scripted engine is closed; ask it before close()")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, and max_model_len={self.max_model_len} leaves no room "
                "for an answer; shorten the prompt or raise max_model_len"
            )
        version = self.policy_version
        token_ids, finish_reason = _cut(tuple(self._answer(prompt_ids, params)), params, room)
        if not token_ids:
            raise ModelError("the script answered with no token; an engine always samples at least one")
        logprobs = (DEFAULT_LOGPROB,) * len(token_ids)
        if self._logprobs is not None:
            logprobs = tuple(self._logprobs(prompt_ids, token_ids))
        if len(logprobs) != len(token_ids):
            raise ModelError(f"the script gave {len(logprobs)} logprobs for {len(token_ids)} tokens")
        return Completion(token_ids, logprobs, finish_reason, version)

    def close(self) -> None:
        """Refuse further requests."""
        self._closed = True


def _cut(ids: tuple[int, ...], params: SamplingParams, room: int) -> tuple[tuple[int, ...], FinishReason]:
    """`ids` up to the first stop token or the token limit, and why they end."""
    stops = set(params.stop_token_ids)
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    limit = min(params.max_tokens, room)
    return (ids[:end], "stop") if end <= limit else (ids[:limit], "length")
