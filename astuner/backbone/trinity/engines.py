"""LLM engines that sample through Trinity's rollout models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

from astuner.errors import ModelError, first_line
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.protocol import LlmEngine, answer_room, reject_unsupported
from astuner.schema import Completion, FinishReason, SamplingParams


@dataclass
class TinkerEngine:
    """Samples from a Tinker service with the weights of Trinity's rollout model.

    Attributes:
        max_model_len: maximum number of tokens in prompt and completion together.
        policy_version: number of training steps that the current weights have been trained for.
    """

    service: tinker.ServiceClient
    max_model_len: int
    policy_version: int = 0
    _path: str = ""
    _client: Any = None

    async def set_weights(self, path: str, version: int, *, base: bool) -> None:
        """Set the weights for new requests: a checkpoint's path at the service, or the `base` model's name.

        `version` is the number of training steps that they have been trained for.
        """
        if path != self._path:
            self._client = await self.service.create_sampling_client_async(
                model_path=None if base else path, base_model=path if base else None
            )
            self._path = path
        self.policy_version = version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            ModelError: the request fails, or the response is invalid.
        """
        room = answer_room(len(prompt_ids), self.max_model_len)
        client, version = self._client, self.policy_version
        sampling_params = types.SamplingParams(
            max_tokens=min(params.max_tokens, room),
            seed=None if params.seed is None else params.seed % 2**63,
            stop=list(params.stop_token_ids),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        try:
            response = await client.sample_async(types.ModelInput.from_ints(list(prompt_ids)), 1, sampling_params)
        except tinker.TinkerError as error:
            raise ModelError(f"sampling from the Tinker service failed: {first_line(error)}") from error
        sequence = response.sequences[0]
        ids, logprobs = tuple(sequence.tokens), tuple(sequence.logprobs or ())
        if not ids or len(ids) != len(logprobs):
            raise ModelError(
                f"the Tinker service returned {len(ids)} tokens and {len(logprobs)} logprobs; expected at least one "
                "token, and one logprob per token"
            )
        reason: FinishReason = "stop" if ids[-1] in params.stop_token_ids else "length"
        return Completion(ids, logprobs, reason, version)

    def close(self) -> None:
        """Do nothing: the service outlives the engine."""


@dataclass(frozen=True)
class RolloutWeights:
    """The current weights of Trinity's rollout model, and where it serves them.

    Attributes:
        version: Trinity's version of the weights; 0 or less for the base model.
        path: the checkpoint's path at the Tinker service, or the base model's name.
        url: the address of vLLM's HTTP API; None with a Tinker service.
    """

    version: int
    path: str
    url: str | None
    model_name: str


async def current_weights(model: Any, *, uses_tinker: bool) -> RolloutWeights:
    """Return the current weights of a Trinity `ModelWrapper`.

    If vLLM's weights change during a request, the request is recorded with the version at its start.
    """
    version, path = None, None
    # Both are read until they agree with the previous read: the weights may change in between.
    while (version, path) != (current := (await model.model_version_async, await model.model.get_model_path.remote())):
        version, path = current
    assert version is not None
    assert path is not None
    return RolloutWeights(
        version, path, None if uses_tinker else f"{model.api_address}/v1", "" if uses_tinker else model.model_name
    )


class RolloutEngine:
    """The engine behind Trinity's rollout model; its weights are set before each share of a batch.

    Args:
        uses_tinker: whether a Tinker service samples; otherwise vLLM does.
        updates: model versions of Trinity in a training step.
    """

    def __init__(self, *, uses_tinker: bool, max_model_len: int, updates: int) -> None:
        self.max_model_len = max_model_len
        self._updates = updates
        self._tinker = TinkerEngine(tinker.ServiceClient(), max_model_len) if uses_tinker else None
        self._inner: LlmEngine | None = self._tinker

    @property
    def policy_version(self) -> int:
        """Number of training steps that the weights for new requests have been trained for."""
        return self._inner.policy_version if self._inner else 0

    async def set_weights(self, weights: RolloutWeights) -> None:
        """Set the weights for new requests."""
        steps = max(weights.version, 0) // self._updates
        if self._tinker:
            await self._tinker.set_weights(weights.path, steps, base=weights.version <= 0)
        else:
            assert weights.url is not None
            self._inner = CompletionsEngine(weights.url, weights.model_name, self.max_model_len, policy_version=steps)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion; see `TinkerEngine.generate`. It raises UnsupportedParameterError."""
        assert self._inner is not None
        # The logprobs of Trinity's vLLM are those after penalties and constraints, which the trainer cannot recompute.
        reject_unsupported(params, "Trinity's rollout model")
        return await self._inner.generate(prompt_ids, params)

    def close(self) -> None:
        """Do nothing: Trinity owns the engines."""
