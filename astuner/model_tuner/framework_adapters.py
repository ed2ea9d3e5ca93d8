"""The model in the form that each agent framework expects, for one of several agents or for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast, overload

from astuner.errors import WorkflowError
from astuner.model_tuner.targets import DEFAULT_TARGET, DebugModel
from astuner.schema import Messages, Tools

if TYPE_CHECKING:
    from agents import OpenAIChatCompletionsModel
    from agentscope.model import ChatResponse
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from langchain_openai import ChatOpenAI
    from openai import AsyncOpenAI, OpenAI
    from pydantic import BaseModel

    from astuner.gateway.http_server import Gateway
    from astuner.model_tuner.agentscope import AgentScopeModel
    from astuner.model_tuner.answers import ChatAnswer
    from astuner.model_tuner.tuner import ModelTuner


class OpenAiEndpoint(NamedTuple):
    """The address and the key with which a client calls the model of one episode and one agent.

    Attributes:
        base_url: the address for OpenAI-compatible clients, which ends with `/v1`.
        api_key: the key, which is valid until the end of the episode.
    """

    base_url: str
    api_key: str

    @property
    def anthropic_base_url(self) -> str:
        """The address for Anthropic's clients, which append `/v1/messages` themselves: without `/v1`."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class ApiConnection:
    """The arguments with which an OpenAI API client calls one agent's model.

    Attributes:
        base_url, api_key: the address and the key.
        http_client, async_http_client: the `httpx.Client` and the `httpx.AsyncClient` to use; None for those that the
            client creates itself. `Any`, because openai 3 declares another type.
    """

    base_url: str
    api_key: str
    http_client: Any = None
    async_http_client: Any = None


@dataclass(frozen=True, slots=True)
class AgentModel:
    """The model of one agent among several (see `ModelTuner.for_agent`)."""

    tuner: ModelTuner
    agent_name: str
    target_tag: str
    debug_model: DebugModel | None = None
    # AgentScope reads these two from a chat model.
    stream: bool = False
    model_name: str = "astuner"

    async def __call__(
        self,
        messages: Messages,
        tools: Tools | None = None,
        tool_choice: str | None = None,
        structured_model: type[BaseModel] | None = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answer like an AgentScope chat model (see `answer_agentscope`)."""
        return await self.tuner(messages, tools, tool_choice, structured_model, **self._identity(), **kwargs)

    async def chat(self, messages: Messages, **kwargs: Any) -> ChatAnswer:
        """Sample one assistant turn (see `ModelTuner.chat`)."""
        return await self.tuner.chat(messages, **self._identity(), **kwargs)

    def _identity(self) -> dict[str, Any]:
        return {"agent_name": self.agent_name, "target_tag": self.target_tag, "debug_model": self.debug_model}


class FrameworkAdapters(ABC):
    """The methods of `ModelTuner` that return the model for an agent framework.

    Each method takes the arguments of `for_agent`. Except for `as_oai_baseurl_apikey`, the returned objects call
    the model in this process, without a socket. A parameter that cannot be honoured is an error with status 400.
    """

    # AgentScope reads these two from a chat model.
    model_name: str
    stream = False
    _endpoints: Gateway | None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # frameworks copy agents; the calls of all copies belong to the episode

    async def __call__(
        self,
        messages: Messages,
        tools: Tools | None = None,
        tool_choice: str | None = None,
        structured_model: type[BaseModel] | None = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answer like an AgentScope chat model (see `answer_agentscope`)."""
        from astuner.model_tuner.agentscope import answer_agentscope

        return await answer_agentscope(cast("ModelTuner", self), messages, tools, tool_choice, structured_model, kwargs)

    @abstractmethod
    def for_agent(self, agent_name: str, target_tag: str = ..., debug_model: DebugModel | None = ...) -> AgentModel:
        """Return the model for one of several agents."""

    def as_oai_baseurl_apikey(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> OpenAiEndpoint:
        """Return the address and the key with which any OpenAI-compatible client calls this model.

        The key is valid until the workflow ends.

        Raises:
            WorkflowError: the episode is not running.
            ServiceError: the server cannot be started.
        """
        return self._open_endpoint(agent_name, target_tag, debug_model)

    def _open_endpoint(
        self, agent_name: str, target_tag: str, debug_model: DebugModel | None, *, issues_keys: bool = False
    ) -> OpenAiEndpoint:
        if self._endpoints is None:
            raise WorkflowError("this model_tuner has no gateway; create it with endpoints=Gateway()")
        tuner = cast("ModelTuner", self)
        return self._endpoints.open_endpoint(tuner, agent_name, target_tag, debug_model, issues_keys=issues_keys)

    def as_agentscope_model(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> AgentScopeModel:
        """Return an AgentScope 1.x chat model, an instance of its `ChatModelBase`."""
        from astuner.model_tuner.agentscope import AgentScopeModel

        return AgentScopeModel(self.for_agent(agent_name, target_tag, debug_model))

    @overload
    def as_raw_openai_sdk_client(
        self, agent_name: str = ..., target_tag: str = ..., debug_model: DebugModel | None = ..., *, sync: Literal[True]
    ) -> OpenAI: ...

    @overload
    def as_raw_openai_sdk_client(
        self,
        agent_name: str = ...,
        target_tag: str = ...,
        debug_model: DebugModel | None = ...,
        *,
        sync: Literal[False] = ...,
    ) -> AsyncOpenAI: ...

    def as_raw_openai_sdk_client(
        self,
        agent_name: str = "",
        target_tag: str = DEFAULT_TARGET,
        debug_model: DebugModel | None = None,
        *,
        sync: bool = False,
    ) -> AsyncOpenAI | OpenAI:
        """Return a client of the official `openai` package; with `sync`, the client that blocks the thread."""
        from openai import AsyncOpenAI, OpenAI

        to = self._connection(agent_name, target_tag, debug_model)
        if sync:
            return OpenAI(api_key=to.api_key, base_url=to.base_url, http_client=to.http_client, timeout=None)
        return AsyncOpenAI(api_key=to.api_key, base_url=to.base_url, http_client=to.async_http_client, timeout=None)

    as_oai_sdk_model = as_raw_openai_sdk_client

    def as_langchain_chat_model(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> ChatOpenAI:
        """Return LangChain's `ChatOpenAI`, for LangChain and LangGraph (package `langchain-openai`)."""
        from langchain_openai import ChatOpenAI

        to = self._connection(agent_name, target_tag, debug_model)
        return ChatOpenAI(
            model=self.model_name,
            api_key=to.api_key,
            base_url=to.base_url,
            http_client=to.http_client,
            http_async_client=to.async_http_client,
            openai_proxy="",  # a proxy of the environment cannot be combined with a client
            timeout=None,
        )

    def as_autogen_model_client(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> OpenAIChatCompletionClient:
        """Return AutoGen's `OpenAIChatCompletionClient` (package `autogen-ext[openai]`)."""
        from autogen_core.models import ModelFamily, ModelInfo
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        to = self._connection(agent_name, target_tag, debug_model)
        return OpenAIChatCompletionClient(
            model=self.model_name,
            model_info=ModelInfo(
                vision=False,
                function_calling=True,
                json_output=False,
                structured_output=False,
                family=ModelFamily.UNKNOWN,
                multiple_system_messages=True,
            ),
            api_key=to.api_key,
            base_url=to.base_url,
            http_client=to.async_http_client,
            timeout=None,
        )

    def as_openai_agents_model(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> OpenAIChatCompletionsModel:
        """Return the `OpenAIChatCompletionsModel` of the OpenAI Agents SDK (package `openai-agents`)."""
        from agents import OpenAIChatCompletionsModel

        client = self.as_raw_openai_sdk_client(agent_name, target_tag, debug_model)
        return OpenAIChatCompletionsModel(self.model_name, client)

    def _connection(self, agent_name: str, target_tag: str, debug_model: DebugModel | None) -> ApiConnection:
        """Return the connection to one agent's model, in the same process."""
        from astuner.model_tuner.in_process import connect

        return connect(self.for_agent(agent_name, target_tag, debug_model))
