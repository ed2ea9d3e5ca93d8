"""Trinity's rollout models as the one seam to whatever samples tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

from astuner.errors import ContextLengthError, ModelError
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import first_line
from astuner.schema import Completion, FinishReason, SamplingParams


@dataclass
class TinkerEngine:
    """Samples from a Tinker service with the weights that Trinity's rollout model has.

    Attributes:
        service: the connection.
        max_model_len: the most tokens, prompt and completion together, that a request may have.
        policy_version: training steps that the weights have learned from.
    """

    service: tinker.ServiceClient
    max_model_len: int
    policy_version: int = 0
    _path: str = ""
    _client: Any = None

    async def use(self, path: str, version: int, *, base: bool) -> None:
        """Sample new requests from other weights.

        Args:
            path: of the service's, or the name of the model to begin with.
            version: training steps that they have learned from.
            base: whether it is the model to begin with.
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
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the service cannot be asked, or answers without tokens.
        """
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, and max_model_len={self.max_model_len} leaves no room for "
                "an answer; shorten the prompt or raise max_model_len"
            )
        client, version = self._client, self.policy_version
        wanted = types.SamplingParams(
            max_tokens=min(params.max_tokens, room),
            seed=None if params.seed is None else params.seed % 2**63,
            stop=list(params.stop_token_ids),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        try:
            answer = await client.sample_async(types.ModelInput.from_ints(list(prompt_ids)), 1, wanted)
        except tinker.TinkerError as error:
            raise ModelError(f"the Tinker service did not sample: {first_line(error)}") from error
        one = answer.sequences[0]
        ids, logprobs = tuple(one.tokens), tuple(one.logprobs or ())
        if not ids or len(ids) != len(logprobs):
            raise ModelError(
                f"the Tinker service gave {len(ids)} tokens and {len(logprobs)} logprobs; expected at least one token, "
                "and a logprob for each"
            )
        reason: FinishReason = "stop" if ids[-1] in params.stop_token_ids else "length"
        return Completion(ids, logprobs, reason, version)

    def close(self) -> None:
        """Do nothing: the service is not ours."""


class RolloutEngine:
    """The engine behind Trinity's rollout model, which gets new weights between a runner's tasks.

    Args:
        tinker_service: whether it is a Tinker service, and not vLLM.
        max_model_len: the most tokens, prompt and completion together, that a request may have.
        updates: versions of Trinity's that a training step makes.
    """

    def __init__(self, *, tinker_service: bool, max_model_len: int, updates: int) -> None:
        self.max_model_len = max_model_len
        self._updates = updates
        self._tinker = TinkerEngine(tinker.ServiceClient(), max_model_len) if tinker_service else None
        self._inner: LlmEngine | None = self._tinker

    @property
    def policy_version(self) -> int:
        """Training steps that the weights of new requests have learned from."""
        return self._inner.policy_version if self._inner else 0

    async def refresh(self, model: Any) -> None:
        """Take the weights that a `ModelWrapper` has by now.

        vLLM may get others while a request runs, which is then recorded with the version of its beginning.
        """
        version, path = None, None
        while (version, path) != (
            found := (await model.model_version_async, await model.model.get_model_path.remote())
        ):
            version, path = found
        assert version is not None
        assert path is not None
        steps = max(version, 0) // self._updates
        if self._tinker:
            await self._tinker.use(path, steps, base=version <= 0)
        else:
            url = f"{model.api_address}/v1"
            self._inner = CompletionsEngine(url, model.model_name, self.max_model_len, policy_version=steps)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        Raises:
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the engine cannot be asked.
        """
        assert self._inner is not None
        return await self._inner.generate(prompt_ids, params)

    def close(self) -> None:
        """Do nothing: the engines are Trinity's."""
