"""An engine over HTTP, for OpenAI-compatible servers that accept and return token ids, such as vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal, Self

import httpx

from astuner.errors import ModelError, first_line
from astuner.llm_engine.protocol import answer_room, reject_unsupported
from astuner.schema import Completion, FinishReason, SamplingParams
from astuner.system.loop_thread import run_to_end

_CONNECT_SECONDS = 10.0
_MAX_QUOTED_CHARS = 300
# Neutral values are sent explicitly: a server takes missing ones from the model's generation_config.json.
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}
_TOKEN_IDS_ADVICE = (
    "astuner records the token ids and logprobs of every call, so the server has to return them: vLLM 0.10.2 and newer "
    "do; or remove debug.base_url to sample in this process"
)


@dataclass(frozen=True)
class CompletionsEngine:
    """Samples from an OpenAI-compatible server through its completions API, with token ids as prompts.

    The server must return the ids of the sampled tokens and their logprobs (in vLLM: `return_token_ids` and
    `logprobs`). vLLM's logprobs are those of the model's distribution before temperature, unless the server was
    started with `--logprobs-mode processed_logprobs`.

    Attributes:
        base_url: address with the API version, such as `http://127.0.0.1:8000/v1`.
        model: the model's name on the server.
        max_model_len: maximum number of tokens in a request, prompt and completion together.
        api_key: bearer token, or None.
        policy_version: version of the weights that the server has.
        launched: whether astuner started the server on this machine. If so, proxies are bypassed, and errors do not
            suggest to change the configured address.
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
        default_model: str,
        max_model_len: int,
        api_key: str | None,
        launched: bool = False,
        timeout: float = 60.0,
    ) -> Self:
        """Find the model on the server, and sample one token to check that the response is complete.

        Args:
            base_url: address with the API version.
            model: the model's name on the server. With None, it is `default_model`, or else the only model there.
            default_model: path or name of the model in the configuration.
            max_model_len: maximum number of tokens in a request; lowered to the server's limit.
            api_key: bearer token, or None.
            launched: whether astuner started the server on this machine.
            timeout: maximum seconds for each of the two requests.

        Raises:
            ModelError: the server cannot be reached, does not answer in time, rejects the key, lacks the model, or its
                response is incomplete.
        """
        engine = cls(base_url.rstrip("/"), model or default_model, max_model_len, api_key, launched=launched)
        return run_to_end(engine._connected(timeout, named=model is not None))

    async def _connected(self, timeout: float, *, named: bool) -> Self:
        async with self._deadline(timeout, "GET /models"):
            listed = await self._request("GET", "/models")
        models = {str(entry.get("id")): entry for entry in listed.get("data") or [] if isinstance(entry, Mapping)}
        name = self.model
        if name not in models:
            if named or len(models) != 1:
                raise ModelError(
                    f"{self.base_url} does not serve model {name!r}; it serves: {', '.join(sorted(models)) or 'none'}. "
                    "Set debug.served_model to one of them"
                )
            (name,) = models
        limit = models[name].get("max_model_len")
        length = min(self.max_model_len, limit) if isinstance(limit, int) else self.max_model_len
        engine = replace(self, model=name, max_model_len=length)
        async with self._deadline(timeout, "POST /completions"):
            await engine.generate((0,), SamplingParams(max_tokens=1))
        return engine

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout: float, request: str) -> AsyncIterator[None]:
        """Limit how long a request outside any episode takes: a server may accept connections and never answer."""
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as error:
            server, key = (
                ("the server that astuner started", "debug.debug_vllm_timeout")
                if self.launched
                else ("the server of debug.base_url", "debug.base_url_timeout")
            )
            raise ModelError(
                f"{server}, {self.base_url}, did not answer {request} within {timeout:g} s; check the server, or raise "
                f"{key}"
            ) from error

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion (see `LlmEngine.generate`)."""
        room = answer_room(len(prompt_ids), self.max_model_len, "rollout.max_model_len")
        constraints = ("response_format",) if params.constraint and params.constraint.json_schema else ()
        supported = ("presence_penalty", "frequency_penalty", "top_logprobs", *constraints)
        reject_unsupported(params, "a model server", supported=supported)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": min(params.max_tokens, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            **_NEUTRAL,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": params.top_logprobs,
            "return_token_ids": True,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        if params.stop:
            body |= {"stop": list(params.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
        if params.top_logprobs:
            body["return_tokens_as_token_ids"] = True
        if params.constraint is not None:
            body["structured_outputs"] = {"json": params.constraint.json_schema}
        response = await self._request("POST", "/completions", body)
        completion = _to_completion(response, prompt_ids, self.base_url, self.policy_version)
        return replace(completion, top_logprobs=_top_logprobs(response, params.top_logprobs, self.base_url))

    def close(self) -> None:
        """Do nothing: each request has its own connection."""

    async def _request(self, method: Literal["GET", "POST"], path: str, body: object = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # The episode's deadline limits the response time. A client is bound to an event loop, and episodes use several.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        try:
            async with httpx.AsyncClient(
                headers=headers, timeout=timeout, verify=self._tls, trust_env=not self.launched
            ) as client:
                response = await client.request(method, self.base_url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            if self.launched:
                raise ModelError(f"the server that astuner started at {self.base_url} {reason}; see its log") from error
            raise ModelError(
                f"the server at debug.base_url {self.base_url} {reason}; "
                "start it, or correct the address (with the API version, as in http://127.0.0.1:8000/v1)"
            ) from error
        return _parse(response, f"{method} {self.base_url}{path}", has_key=self.api_key is not None)


def _parse(response: httpx.Response, request: str, *, has_key: bool) -> dict[str, Any]:
    """Return the JSON object of a response."""
    text = response.text[:_MAX_QUOTED_CHARS]
    if response.status_code in (401, 403):
        advice = "check the key in that variable" if has_key else "set debug.api_key_env"
        raise ModelError(
            f"{request} was rejected ({response.status_code}): {text}. debug.api_key_env names the environment "
            f"variable that holds the server's key; {advice}"
        )
    if response.status_code == 404:
        raise ModelError(
            f"{request}: not found (404): {text}. debug.base_url must end with the API version, as in "
            "http://127.0.0.1:8000/v1, and the server must have the completions API"
        )
    if response.is_error:
        raise ModelError(f"{request} failed ({response.status_code}): {text}")
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ModelError(f"{request} did not return a JSON object: {text!r}; is debug.base_url an OpenAI API?")
    return content


def _to_completion(response: Mapping[str, Any], prompt_ids: Sequence[int], url: str, version: int) -> Completion:
    choice = (response.get("choices") or [{}])[0]
    token_ids: list[int] | None = choice.get("token_ids")
    logprobs: list[float | None] | None = (choice.get("logprobs") or {}).get("token_logprobs")
    missing = [name for name, value in (("token_ids", token_ids), ("logprobs.token_logprobs", logprobs)) if not value]
    if not token_ids or not logprobs:
        raise ModelError(f"{url}/completions returned no choices[0].{' and no '.join(missing)}; {_TOKEN_IDS_ADVICE}")
    numbers = [logprob for logprob in logprobs if logprob is not None]
    if len(token_ids) != len(numbers):
        raise ModelError(f"{url}/completions returned {len(token_ids)} token ids with {len(numbers)} logprobs")
    served_prompt = choice.get("prompt_token_ids")
    if served_prompt is not None and list(served_prompt) != list(prompt_ids):
        raise ModelError(
            f"{url}/completions changed the prompt: {len(prompt_ids)} ids were sent, {len(served_prompt)} were used"
        )
    reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Completion(tuple(token_ids), tuple(map(float, numbers)), reason, version)


def _top_logprobs(response: Mapping[str, Any], number: int, url: str) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return ids and logprobs for the `number` most likely tokens at each position in a completion."""
    if not number:
        return ()
    listed = ((response.get("choices") or [{}])[0].get("logprobs") or {}).get("top_logprobs") or []
    try:
        # vLLM adds the sampled token if it is not among the most likely ones.
        positions = [
            sorted(
                ((int(name.removeprefix("token_id:")), float(value)) for name, value in position.items()),
                key=itemgetter(1),
            )
            for position in listed
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{url}/completions returned top_logprobs that have no token ids (vLLM: return_tokens_as_token_ids); leave "
            f"top_logprobs out: {first_line(error)}"
        ) from error
    if not positions:
        raise ModelError(f"{url}/completions returned no top_logprobs; leave top_logprobs out")
    return tuple(tuple(position[: -number - 1 : -1]) for position in positions)
