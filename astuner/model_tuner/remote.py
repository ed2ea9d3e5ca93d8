"""The model of an episode in another process, such as a child that a workflow has started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import httpx

from astuner.errors import (
    AgentMadness,
    CallLimitError,
    ContextLengthError,
    InvalidRequestError,
    ModelError,
    UnsupportedParameterError,
    WorkflowError,
)
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.framework_adapters import AgentModel, ApiConnection, FrameworkAdapters, OpenAiEndpoint
from astuner.model_tuner.targets import DEFAULT_TARGET, DebugModel
from astuner.run_record.jsonable import decode, to_jsonable
from astuner.schema import Messages, Tools

CHAT_PATH = "/astuner/chat"
"""The path, after the base URL, that answers with an encoded `ChatAnswer`."""
KEY_PATH = "/astuner/key"
"""The path, after the base URL, that returns the key for another agent of the same episode."""

# Seconds to wait before a retry if the gateway has too many calls in progress.
_RETRY_SECONDS = 1.0
_CONNECT_SECONDS = 30.0


class RemoteModelTuner(FrameworkAdapters):
    """A `ModelTuner` outside its episode's process. Every call goes through the episode's gateway.

    `ModelTuner` is unpickled as this class. It shares the episode's record and limits.
    """

    def __init__(self, base_url: str, api_key: str, model_name: str = "astuner") -> None:
        self.model_name = model_name
        self._endpoint = OpenAiEndpoint(base_url, api_key)
        self._keys: dict[tuple[str, str], str] = {}

    def __reduce__(self) -> tuple[type[RemoteModelTuner], tuple[str, str, str]]:
        return RemoteModelTuner, (*self._endpoint, self.model_name)

    def for_agent(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> AgentModel:
        """Return the model for one of several agents (see `ModelTuner.for_agent`).

        Raises:
            WorkflowError: `debug_model` is set, which only the process of the episode can call.
        """
        _reject_debug_model(debug_model)
        return AgentModel(self, agent_name, target_tag)  # type: ignore[arg-type]

    def as_oai_baseurl_apikey(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> OpenAiEndpoint:
        """Return the address and the key with which any OpenAI-compatible client calls this model.

        Raises:
            WorkflowError: the episode has ended, or `debug_model` is set.
        """
        _reject_debug_model(debug_model)
        if (agent_name, target_tag) not in self._keys:
            body = {"agent_name": agent_name, "target_tag": target_tag}
            with httpx.Client(trust_env=False, timeout=_CONNECT_SECONDS) as client:
                response = client.post(
                    self._endpoint.base_url + KEY_PATH, json=body, headers=_authorization(self._endpoint.api_key)
                )
            if response.is_error:
                _raise_error(response)
            self._keys[agent_name, target_tag] = response.json()["api_key"]
        return OpenAiEndpoint(self._endpoint.base_url, self._keys[agent_name, target_tag])

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        agent_name: str = "",
        target_tag: str = DEFAULT_TARGET,
        debug_model: DebugModel | None = None,
        **parameters: Any,
    ) -> ChatAnswer:
        """Sample one assistant turn (see `ModelTuner.chat` for the arguments and errors).

        Raises:
            ModelError: the gateway cannot be reached, because the episode's process has ended.
        """
        endpoint = self.as_oai_baseurl_apikey(agent_name, target_tag, debug_model)
        content = {**parameters, "model": self.model_name, "messages": messages, "tools": tools}
        body = to_jsonable(content, lambda text: text)
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=timeout) as client:
                while True:
                    response = await client.post(
                        endpoint.base_url + CHAT_PATH, json=body, headers=_authorization(endpoint.api_key)
                    )
                    if response.status_code != 429:
                        break
                    await asyncio.sleep(_RETRY_SECONDS)
        except httpx.HTTPError as error:
            raise ModelError(
                f"the model at {endpoint.base_url} cannot be reached: {error!r}; check that the run has not ended"
            ) from error
        if response.is_error:
            _raise_error(response)
        return _decode_answer(response.json()["answer"])

    def _connection(self, agent_name: str, target_tag: str, debug_model: DebugModel | None) -> ApiConnection:
        return ApiConnection(*self.as_oai_baseurl_apikey(agent_name, target_tag, debug_model))


def _decode_answer(row: Mapping[str, Any]) -> ChatAnswer:
    """Return the answer that `run_record.jsonable.encode` has encoded."""
    answer = decode(ChatAnswer, {**row, "top_logprobs": [], "alternatives": []})
    return replace(
        answer,
        top_logprobs=tuple(tuple((int(token), float(p)) for token, p in one) for one in row["top_logprobs"]),
        alternatives=tuple(map(_decode_answer, row["alternatives"])),
    )


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def _reject_debug_model(debug_model: DebugModel | None) -> None:
    if debug_model is not None:
        raise WorkflowError(
            "a debug_model can only be called in the process of the episode; name the model in rollout.frozen_models"
        )


def _raise_error(response: httpx.Response) -> NoReturn:
    """Raise the `ModelTuner.chat` error that the gateway's response stands for."""
    try:
        error = response.json()["error"]
        message, code, name = str(error["message"]), error["code"], error["param"]
    except (ValueError, LookupError, TypeError):
        raise ModelError(f"the gateway answered with status {response.status_code}: {response.text[:200]}") from None
    errors = {
        "context_length_exceeded": ContextLengthError,
        "max_steps_exceeded": CallLimitError,
        "degenerate_output": AgentMadness,
    }
    if code == "unsupported_parameter":
        raise UnsupportedParameterError(message, name)
    if code in errors:
        raise errors[code](message)
    if response.status_code >= 500 and code != "upstream_error":
        raise ModelError(message)
    raise InvalidRequestError(message, name) if name is not None else WorkflowError(message)
