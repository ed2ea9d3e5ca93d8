"""The interface of all inference engines: token ids in, token ids and logprobs out.

Engines know nothing about messages, chat templates or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from astuner.schema import Completion, SamplingParams


class LlmEngine(Protocol):
    """Samples completions of token prompts. May be called concurrently, from any number of event loops."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request, prompt and completion together."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that new requests are sampled with."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        Args:
            prompt_ids: at least one token id.
            params: sampling parameters; `len(prompt_ids) + params.max_tokens` is capped at `max_model_len`.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            ModelError: the engine is closed or broken.
        """
        ...

    def close(self) -> None:
        """Stop the engine and free its resources. Pending requests raise `ModelError`."""
        ...
