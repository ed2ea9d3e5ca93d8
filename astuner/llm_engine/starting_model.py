"""An engine for the policy and the starting model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from astuner.llm_engine.protocol import LlmEngine
from astuner.schema import Completion, SamplingParams


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
