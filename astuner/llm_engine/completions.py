"""An engine behind HTTP: any OpenAI-compatible server that takes and returns token ids, such as vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import httpx

from astuner.errors import ContextLengthError, ModelError
from astuner.schema import Completion, FinishReason, SamplingParams

_CONNECT_SECONDS = 10.0
_MOST_OF_AN_ANSWER = 300
# Said although they do nothing: a server takes what is left out from the model's generation_config.json.
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_WHAT_SERVES = (
    "astuner records token by token what the model was given and what it said, so the server has to return token ids "
    "and logprobs: vLLM 0.10.2 and newer do; or leave debug.base_url out to sample in this process"
)


@dataclass(frozen=True)
class CompletionsEngine:
    """Samples from an OpenAI-compatible server by its completions API, with token ids as prompt.

    It needs the ids of the sampled tokens and their logprobs (in vLLM: `return_token_ids` and `logprobs`).
    The logprobs are what the server reports: vLLM's are of the model's own distribution, before temperature, unless
    it was started with `--logprobs-mode processed_logprobs`.

    Attributes:
        base_url: with the version, `http://127.0.0.1:8000/v1`.
        model: its name there.
        max_model_len: the most tokens, prompt and completion together, that a request may have.
        api_key: sent as a bearer token where there is one.
        policy_version: of the weights that it serves.
        launched: astuner started it on this machine, so that no proxy is on the way and no setting is to be mended.
    """

    base_url: str
    model: str
    max_model_len: int
    api_key: str | None = field(default=None, repr=False)
    policy_version: int = 0
    launched: bool = False
    _tls: ssl.SSLContext = field(default_factory=httpx.create_ssl_context, repr=False)

    @classmethod
    def connect(
        cls,
        base_url: str,
        *,
        model: str | None,
        wanted: str,
        max_model_len: int,
        api_key: str | None,
        launched: bool = False,
        timeout: float = 60.0,
    ) -> Self:
        """Find the model on the server, and sample one token to see that all that is needed comes back.

        Args:
            base_url: with the version.
            model: its name there; None for `wanted`, or the only one that is served.
            wanted: the model's path or name in the configuration.
            max_model_len: the most tokens that a request may have; lowered to what the server says.
            api_key: sent as a bearer token where there is one.
            launched: astuner started it on this machine.
            timeout: seconds that each of the two answers may take.

        Raises:
            ModelError: the server cannot be reached, does not answer in time, refuses the key, or lacks something.
        """
        engine = cls(base_url.rstrip("/"), model or wanted, max_model_len, api_key, launched=launched)
        return asyncio.run(engine._connected(timeout, named=model is not None))

    async def _connected(self, timeout: float, *, named: bool) -> Self:
        async with self._answering(timeout, "GET /models"):
            listed = await self._request("GET", "/models")
        models = {str(entry.get("id")): entry for entry in listed.get("data") or [] if isinstance(entry, Mapping)}
        name = self.model
        if name not in models:
            if named or len(models) != 1:
                raise ModelError(
                    f"{self.base_url} serves no model {name!r}; it serves: {', '.join(sorted(models)) or 'none'}. "
                    "Name one of them as debug.served_model"
                )
            (name,) = models
        longest = models[name].get("max_model_len")
        length = min(self.max_model_len, longest) if isinstance(longest, int) else self.max_model_len
        engine = replace(self, model=name, max_model_len=length)
        async with self._answering(timeout, "POST /completions"):
            await engine.generate((0,), SamplingParams(max_tokens=1))
        return engine

    @contextlib.asynccontextmanager
    async def _answering(self, timeout: float, request: str) -> AsyncIterator[None]:
        """Bound what no episode's deadline does: a server that accepts a connection may never answer."""
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as error:
            which, key = (
                ("that astuner started", "debug.debug_vllm_timeout")
                if self.launched
                else ("of debug.base_url", "debug.base_url_timeout")
            )
            raise ModelError(
                f"the server {which}, {self.base_url}, did not answer {request} within {timeout:g} s; look at what it "
                f"is at, or raise {key}"
            ) from error

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        Raises:
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the server cannot be reached, or its answer lacks something.
        """
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, and max_model_len={self.max_model_len} leaves no room for "
                "an answer; shorten the prompt or raise rollout.max_model_len"
            )
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": min(params.max_tokens, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            **_NEUTRAL,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        answer = await self._request("POST", "/completions", body)
        return _completion(answer, prompt_ids, self.base_url, self.policy_version)

    def close(self) -> None:
        """Do nothing: no connection outlives its request."""

    async def _request(self, method: Literal["GET", "POST"], path: str, body: object = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # The episode's own deadline bounds the answer. A client belongs to one event loop, and episodes have many.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        try:
            async with httpx.AsyncClient(
                headers=headers, timeout=timeout, verify=self._tls, trust_env=not self.launched
            ) as client:
                response = await client.request(method, self.base_url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            if self.launched:
                raise ModelError(
                    f"the server that astuner started at {self.base_url} {reason}; its log says why"
                ) from error
            raise ModelError(
                f"the server at debug.base_url {self.base_url} {reason}; "
                "start it, or mend the address (with its version, as in http://127.0.0.1:8000/v1)"
            ) from error
        return _content(response, f"{method} {self.base_url}{path}", has_key=self.api_key is not None)


def _content(response: httpx.Response, request: str, *, has_key: bool) -> dict[str, Any]:
    said = response.text[:_MOST_OF_AN_ANSWER]
    if response.status_code in (401, 403):
        advice = "look at the key in it" if has_key else "name it"
        raise ModelError(
            f"{request} was refused ({response.status_code}): {said}. debug.api_key_env is the environment variable "
            f"that holds the server's key; {advice}"
        )
    if response.status_code == 404:
        raise ModelError(
            f"{request}: there is no such place (404): {said}. debug.base_url ends with the version, as in "
            "http://127.0.0.1:8000/v1, of a server that has the completions API"
        )
    if response.is_error:
        raise ModelError(f"{request} failed ({response.status_code}): {said}")
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ModelError(f"{request} answered with what is no JSON object: {said!r}; is debug.base_url an OpenAI API?")
    return content


def _completion(answer: Mapping[str, Any], prompt_ids: Sequence[int], url: str, version: int) -> Completion:
    """Return the completion in an answer.

    Raises:
        ModelError: the answer lacks token ids or logprobs, or they do not fit each other or the prompt.
    """
    choice = (answer.get("choices") or [{}])[0]
    token_ids: list[int] | None = choice.get("token_ids")
    logprobs: list[float | None] | None = (choice.get("logprobs") or {}).get("token_logprobs")
    missing = [name for name, value in (("token_ids", token_ids), ("logprobs.token_logprobs", logprobs)) if not value]
    if not token_ids or not logprobs:
        raise ModelError(f"{url}/completions returned no choices[0].{' and no '.join(missing)}; {_WHAT_SERVES}")
    numbers = [logprob for logprob in logprobs if logprob is not None]
    if len(token_ids) != len(numbers):
        raise ModelError(f"{url}/completions returned {len(token_ids)} token ids with {len(numbers)} logprobs")
    given = choice.get("prompt_token_ids")
    if given is not None and list(given) != list(prompt_ids):
        raise ModelError(
            f"{url}/completions changed the prompt: {len(prompt_ids)} ids were sent, {len(given)} were read"
        )
    reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Completion(tuple(token_ids), tuple(map(float, numbers)), reason, version)
