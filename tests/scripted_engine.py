"""An engine whose completions come from a function, for tests that need no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from astuner.errors import ModelError
from astuner.llm_engine.protocol import answer_room, reject_unsupported
from astuner.schema import Completion, SamplingParams

DEFAULT_LOGPROB = -0.5


class ScriptedEngine:
    """An `LlmEngine` that completes each prompt with the result of `answer`, truncated as a real engine would.

    Args:
        answer: function of the prompt ids and the sampling parameters that returns at least one token id. Ids after
            the first stop token or beyond the token limit are cut off.
        max_model_len: maximum number of tokens in a request, prompt and completion together.
        logprobs: function of the prompt ids and the truncated completion ids that returns one logprob per completion
            id; by default, each logprob is -0.5.
        policy_version: policy version of the completions. May be set at any time.
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
        """Return the scripted completion. Its `finish_reason` is `length` if the token limit truncated it."""
        # Yield to the event loop as a real engine does; otherwise, concurrent calls would never interleave in tests.
        await asyncio.sleep(0)
        if self._closed:
            raise ModelError("the scripted engine is closed; requests must come before close()")
        room = answer_room(len(prompt_ids), self.max_model_len)
        reject_unsupported(params, "the scripted engine")
        version = self.policy_version
        script = tuple(self._answer(prompt_ids, params))
        end = next((i + 1 for i, token in enumerate(script) if token in params.stop_token_ids), len(script))
        limit = min(params.max_tokens, room)
        token_ids = script[: min(end, limit)]
        if not token_ids:
            raise ModelError("the script returned no token; an engine always samples at least one")
        logprobs = (DEFAULT_LOGPROB,) * len(token_ids)
        if self._logprobs is not None:
            logprobs = tuple(self._logprobs(prompt_ids, token_ids))
        if len(logprobs) != len(token_ids):
            raise ModelError(f"the script returned {len(logprobs)} logprobs for {len(token_ids)} tokens")
        return Completion(token_ids, logprobs, "stop" if end <= limit else "length", version)

    def close(self) -> None:
        """Make further requests raise `ModelError`."""
        self._closed = True
