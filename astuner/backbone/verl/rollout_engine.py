"""verl's rollout engines behind astuner's `LlmEngine` protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from astuner.backbone.training.checkpoints import RESUME_HINT
from astuner.backbone.verl.rules import SAMPLER_LOGPROBS
from astuner.errors import AstunerError, ModelError, first_line
from astuner.llm_engine.protocol import answer_room, reject_unsupported
from astuner.schema import Completion, FinishReason, SamplingParams
from astuner.task_rollout.active_episodes import current_episode

_HEALTH_TIMEOUT_SECONDS = 60.0


class VerlEngine:
    """An `LlmEngine` that sends requests to verl's rollout engines through verl's `LLMServerClient`.

    New requests are sampled with the weights of `policy_version`, which may be set at any time.
    """

    def __init__(self, client: Any, max_model_len: int, policy_version: int = 0) -> None:
        self._client = client
        self.max_model_len = max_model_len
        self.policy_version = policy_version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        All calls of an episode go to the same engine, so that they hit its prefix cache. Other calls go to the engine
        with the fewest requests.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            UnsupportedParameterError: the engine does not have a parameter, or the trainer cannot recompute its effect.
            ModelError: the engine failed, or its actor died.
        """
        max_new_tokens = answer_room(len(prompt_ids), self.max_model_len)
        # The logprobs of verl's vLLM are those after penalties and constraints, which the trainer cannot recompute.
        reject_unsupported(params, "verl's rollout engine")
        sampling = _sampling_options(params, max_new_tokens)
        request_id = current_episode() or uuid4().hex
        with _ray_errors():
            output = await self._client.generate(request_id, prompt_ids=list(prompt_ids), sampling_params=sampling)
        return _to_completion(output, params)

    def close(self) -> None:
        """Do nothing: verl owns the engines."""


async def generate_on(server: Any, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
    """Sample one completion from one of verl's engines; raise ModelError if it failed, or its actor died.

    `params` have no penalties and constraints, and the engine must have room for `max_tokens`.
    """
    sampling = _sampling_options(params, params.max_tokens)
    with _ray_errors():
        output = await server.generate.remote(
            prompt_ids=list(prompt_ids), sampling_params=sampling, request_id=uuid4().hex
        )
    return _to_completion(output, params)


def _sampling_options(params: SamplingParams, max_new_tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": min(params.max_tokens, max_new_tokens),
        "stop_token_ids": list(params.stop_token_ids),
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    if params.seed is not None:
        sampling["seed"] = params.seed % 2**63
    return sampling


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise the errors of an engine's actor as `ModelError`, and astuner's own errors as they are."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, AstunerError):
            raise error.cause from None
        raise ModelError(f"the rollout engine raised {type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        raise ModelError(f"the rollout engine died: {str(error).splitlines()[0]}") from error


def _to_completion(output: Any, params: SamplingParams) -> Completion:
    """Convert verl's `TokenOutput`."""
    ids, logprobs = tuple(output.token_ids), tuple(output.log_probs or ())
    if not ids or len(ids) != len(logprobs):
        raise ModelError(
            f"the rollout engine returned {len(ids)} tokens and {len(logprobs)} logprobs (stop reason "
            f"{output.stop_reason!r}); expected at least one token, and one logprob per token"
        )
    reason: FinishReason = "stop" if ids[-1] in params.stop_token_ids else "length"
    extra = output.extra_fields
    version, sampler_logprobs = int(extra.get("global_steps") or 0), tuple(extra.get(SAMPLER_LOGPROBS) or ())
    return Completion(ids, logprobs, reason, version, sampler_logprobs=sampler_logprobs)


def check_engines_alive(servers: Sequence[Any]) -> None:
    """Raise ModelError, with the cause, if a rollout engine cannot serve requests any more."""
    # The embedded engine has a method for this; verl's servers do not.
    checks = [
        server.ready.remote() if hasattr(server, "ready") else server.__ray_call__.remote(_vllm_failure)
        for server in servers
    ]
    for number, check in enumerate(checks, 1):
        cause: Exception | None = None
        try:
            failure = ray.get(check, timeout=_HEALTH_TIMEOUT_SECONDS)
        except RayError as error:
            cause, failure = error, first_line(error)
        if isinstance(failure, str):
            name = "a rollout engine" if len(servers) == 1 else f"rollout engine {number} of {len(servers)}"
            raise ModelError(f"{name} failed: {failure}. {RESUME_HINT}") from cause


def check_router_alive(router: Any) -> None:
    """Check that the process that distributes the requests over the engines has not died.

    Without it, all later episodes would fail.

    Raises:
        ModelError: it died. The message includes the cause.
    """
    try:
        ray.get(router.__ray_ready__.remote(), timeout=_HEALTH_TIMEOUT_SECONDS)
    except RayError as error:
        raise ModelError(
            f"the router of requests to the rollout engines failed: {first_line(error)}. {RESUME_HINT}"
        ) from error


def _vllm_failure(server: Any) -> str | None:
    """Return a vLLM server's failure, or None. Runs in the server's process.

    vLLM computes in a separate EngineCore process. If that process dies, the server stays alive, and vLLM sets
    `AsyncLLM.errored`.
    """
    engine = getattr(server, "engine", None)  # None on the further nodes of a multi-node replica
    if engine is None or not getattr(engine, "errored", False):
        return None
    return "vLLM's engine process (EngineCore) died, while its server process is still running"
