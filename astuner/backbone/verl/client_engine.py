"""verl's rollout engines as the one seam to whatever samples tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from ray.exceptions import RayError, RayTaskError

from astuner.errors import AstunerError, ContextLengthError, ModelError
from astuner.schema import Completion, FinishReason, SamplingParams
from astuner.task_rollout import current_episode


class VerlEngine:
    """Asks verl's engines, token ids in, token ids and logprobs out.

    Args:
        client: verl's `LLMServerClient`, which chooses among the engines.
        max_model_len: the most tokens, prompt and completion together, that a request may have.
        policy_version: the version of the weights that new requests are sampled with; may be set anew.
    """

    def __init__(self, client: Any, max_model_len: int, policy_version: int = 0) -> None:
        self._client = client
        self.max_model_len = max_model_len
        self.policy_version = policy_version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        The calls of an episode go to one engine, whose cache has their prefix; any other call to that with the fewest.

        Raises:
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the engine is broken or gone.
        """
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, and max_model_len={self.max_model_len} leaves no room for "
                "an answer; shorten the prompt or raise max_model_len"
            )
        try:
            output = await self._client.generate(
                current_episode() or uuid4().hex, prompt_ids=list(prompt_ids), sampling_params=_sampling(params, room)
            )
        except RayTaskError as error:
            if isinstance(error.cause, AstunerError):
                raise type(error.cause)(str(error.cause)) from None
            raise ModelError(f"the rollout engine raised {type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            raise ModelError(f"the rollout engine is gone: {str(error).splitlines()[0]}") from error
        return _completion(output, params)

    def close(self) -> None:
        """Do nothing: the engines are verl's."""


def _sampling(params: SamplingParams, room: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": min(params.max_tokens, room),
        "stop_token_ids": list(params.stop_token_ids),
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    return sampling if params.seed is None else sampling | {"seed": params.seed % 2**63}


def _completion(output: Any, params: SamplingParams) -> Completion:
    """Return verl's `TokenOutput` as a completion.

    Raises:
        ModelError: it has no tokens, or not one logprob for each.
    """
    ids, logprobs = tuple(output.token_ids), tuple(output.log_probs or ())
    if not ids or len(ids) != len(logprobs):
        raise ModelError(
            f"the rollout engine gave {len(ids)} tokens and {len(logprobs)} logprobs (stop reason "
            f"{output.stop_reason!r}); expected at least one token, and a logprob for each"
        )
    reason: FinishReason = "stop" if ids[-1] in params.stop_token_ids else "length"
    return Completion(ids, logprobs, reason, int(output.extra_fields.get("global_steps") or 0))
