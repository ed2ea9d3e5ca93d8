"""The model in the form that each agent framework expects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Self, cast, overload

from astuner.errors import WorkflowError
from astuner.model_tuner.targets import DEFAULT_TARGET, DebugModel

if TYPE_CHECKING:
    from agents import OpenAIChatCompletionsModel
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from langchain_openai import ChatOpenAI
    from openai import AsyncOpenAI, OpenAI

    from astuner.model_tuner.agent_model import AgentModel
    from astuner.model_tuner.agentscope_model import AgentScopeModel
    from astuner.model_tuner.endpoint import EndpointOpener, OpenAiEndpoint
    from astuner.model_tuner.tuner import ModelTuner


class ModelFaces(ABC):
    """The methods of `ModelTuner` that return the model for an agent framework.

    The arguments of each method are those of `for_agent`. Except for `as_oai_baseurl_apikey`, the returned objects call
    the model in this process, without a socket. A parameter that cannot be honoured is an error with status 400.
    """

    _endpoints: EndpointOpener | None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # frameworks copy agents; the calls of all copies belong to the episode

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
        if self._endpoints is None:
            raise WorkflowError("this model_tuner has no gateway; create it with endpoints=Gateway()")
        return self._endpoints.open_endpoint(cast("ModelTuner", self), agent_name, target_tag, debug_model)

    def as_agentscope_model(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> AgentScopeModel:
        """Return an AgentScope 1.x chat model, an instance of its `ChatModelBase`."""
        from astuner.model_tuner.agentscope_model import AgentScopeModel

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

        from astuner.model_tuner.in_process import API_KEY, BASE_URL, async_http_client, http_client

        model = self.for_agent(agent_name, target_tag, debug_model)
        if sync:
            return OpenAI(api_key=API_KEY, base_url=BASE_URL, http_client=http_client(model), timeout=None)
        return AsyncOpenAI(api_key=API_KEY, base_url=BASE_URL, http_client=async_http_client(model), timeout=None)

    as_oai_sdk_model = as_raw_openai_sdk_client

    def as_langchain_chat_model(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> ChatOpenAI:
        """Return LangChain's `ChatOpenAI`, for LangChain and LangGraph (package `langchain-openai`)."""
        from langchain_openai import ChatOpenAI

        from astuner.model_tuner.in_process import API_KEY, BASE_URL, async_http_client, http_client

        model = self.for_agent(agent_name, target_tag, debug_model)
        return ChatOpenAI(
            model=model.model_name,
            api_key=API_KEY,
            base_url=BASE_URL,
            http_client=http_client(model),
            http_async_client=async_http_client(model),
            openai_proxy="",  # of the environment, which cannot be combined with a client
            timeout=None,
        )

    def as_autogen_model_client(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> OpenAIChatCompletionClient:
        """Return AutoGen's `OpenAIChatCompletionClient` (package `autogen-ext[openai]`)."""
        from autogen_core.models import ModelFamily, ModelInfo
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        from astuner.model_tuner.in_process import API_KEY, BASE_URL, async_http_client

        model = self.for_agent(agent_name, target_tag, debug_model)
        return OpenAIChatCompletionClient(
            model=model.model_name,
            model_info=ModelInfo(
                vision=False,
                function_calling=True,
                json_output=False,
                structured_output=False,
                family=ModelFamily.UNKNOWN,
                multiple_system_messages=True,
            ),
            api_key=API_KEY,
            base_url=BASE_URL,
            http_client=async_http_client(model),
            timeout=None,
        )

    def as_openai_agents_model(
        self, agent_name: str = "", target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> OpenAIChatCompletionsModel:
        """Return the `OpenAIChatCompletionsModel` of the OpenAI Agents SDK (package `openai-agents`)."""
        from agents import OpenAIChatCompletionsModel

        client = self.as_raw_openai_sdk_client(agent_name, target_tag, debug_model)
        return OpenAIChatCompletionsModel(self.for_agent(agent_name).model_name, client)
