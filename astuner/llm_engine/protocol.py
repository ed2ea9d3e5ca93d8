"""The interface of all inference engines: token ids in, token ids and logprobs out.

Engines know nothing about messages, chat templates or tokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from astuner.errors import UnsupportedParameterError
from astuner.schema import Completion, SamplingParams


class LlmEngine(Protocol):
    """Samples completions of token prompts. May be called concurrently, from any number of event loops."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens in a request, prompt and completion together."""
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
            UnsupportedParameterError: the engine cannot honour a parameter.
            ModelError: the engine is closed or broken.
        """
        ...

    def close(self) -> None:
        """Stop the engine and free its resources. Pending requests raise `ModelError`."""
        ...


def reject_unsupported(params: SamplingParams, engine: str, *, supported: Collection[str] = ()) -> None:
    """Check that an engine can honour the parameters that not every engine has.

    Args:
        params: the parameters of a request.
        engine: the engine, for the message.
        supported: those of `presence_penalty`, `frequency_penalty`, `top_logprobs`, `response_format` and `tool_choice`
            that it has; the last two are the parameters of a `constraint`.

    Raises:
        UnsupportedParameterError: a parameter is not supported.
    """
    requested = {name: getattr(params, name) for name in ("presence_penalty", "frequency_penalty", "top_logprobs")}
    if params.constraint is not None:
        requested[params.constraint.parameter] = params.constraint.json_schema or "required"
    for name, value in requested.items():
        if value and name not in supported:
            also = f"; it supports {', '.join(sorted(supported))}" if supported else ""
            raise UnsupportedParameterError(
                f"{engine} does not support {name} (the request has {value!r}){also}. Leave {name} out, or use an "
                "engine that supports it (see the table of sampling parameters in docs/en/workflow.md)",
                name,
            )
