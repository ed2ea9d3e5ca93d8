"""Addresses at which other programs reach the model of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from astuner.model_tuner.targets import DebugModel
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


class EndpointOpener(Protocol):
    """Serves the models of episodes over HTTP."""

    @property
    def names_of_trained_model(self) -> tuple[str, ...]:
        """The names by which a request can call the model in training."""
        ...

    def open_endpoint(
        self,
        tuner: ModelTuner,
        agent_name: str,
        target_tag: str,
        debug_model: DebugModel | None,
        *,
        issues_keys: bool = False,
    ) -> OpenAiEndpoint:
        """Return an endpoint for one of the episode's agents. Thread-safe.

        With the key, its holder can get keys for the other agents of the episode if `issues_keys` is True.

        Raises:
            WorkflowError: the episode has ended or has not started.
            ServiceError: the server cannot be started.
        """
        ...
