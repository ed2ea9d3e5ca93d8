"""The interface of all inference engines: token ids in, token ids and logprobs out.

Engines know nothing about messages, chat templates or tokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from astuner.errors import ContextLengthError, UnsupportedParameterError
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


@dataclass(frozen=True)
class EngineWithStartingModel:
    """Samples each request with the weights that it names (`SamplingParams.weights`).

    Attributes:
        policy: samples from the policy.
        starting_model: samples from the starting model.
    """

    policy: LlmEngine
    starting_model: LlmEngine

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens in a request, prompt and completion together."""
        return self.policy.max_model_len

    @property
    def policy_version(self) -> int:
        """Version of the policy's weights."""
        return self.policy.policy_version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion. For the errors, see `LlmEngine.generate`."""
        engine = self.starting_model if params.weights == "starting_model" else self.policy
        return await engine.generate(prompt_ids, params)

    def close(self) -> None:
        """Stop both engines."""
        self.policy.close()
        self.starting_model.close()


def answer_room(prompt_length: int, max_model_len: int, key: str = "max_model_len") -> int:
    """Return how many tokens an answer may have; raise ContextLengthError, which names `key`, if there is no room."""
    if prompt_length >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {prompt_length} tokens, and max_model_len={max_model_len} leaves no room for an answer; "
            f"shorten the prompt or raise {key}"
        )
    return max_model_len - prompt_length


def reject_unsupported(params: SamplingParams, engine: str, *, supported: Collection[str] = ()) -> None:
    """Check that an engine can honour the parameters that not every engine has.

    Args:
        supported: the names that the engine supports, out of `presence_penalty`, `frequency_penalty`, `top_logprobs`,
            `response_format` and `tool_choice`; the last two set `SamplingParams.constraint`.

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
