"""The one seam to whatever samples tokens: ids in, ids and logprobs out.

An engine knows nothing of messages, templates or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from astuner.schema import Completion, SamplingParams


class LlmEngine(Protocol):
    """Samples completions for token prompts. Safe to call from many coroutines of any event loop at once."""

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and completion together, that a request may have."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights that new requests are sampled with."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        Args:
            prompt_ids: at least one token id.
            params: how to sample; `len(prompt_ids) + params.max_tokens` is capped at `max_model_len`.

        Raises:
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the engine is closed or broken.
        """
        ...

    def close(self) -> None:
        """Stop the engine and free what it holds; pending requests raise `ModelError`."""
        ...
