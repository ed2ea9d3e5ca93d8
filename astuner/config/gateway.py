"""Section `gateway`: the HTTP server through which programs call the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from astuner.config.section import Count, PositiveInt, Seconds, Section, key


class GatewayConfig(Section):
    """`gateway`: the HTTP server behind model_tuner.as_oai_baseurl_apikey(), one per process that runs episodes.

    It starts when a workflow first asks for an address.
    """

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 lets programs on other machines call the model, with a key of an episode."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port; if it is taken, the next free one. 0 is any free port."""
    model_names: list[str] = key([])
    """Further names of the model in training, for agents with a fixed name; astuner and model.path always work."""
    max_concurrent_calls: Count = 4096
    """Calls in progress at the same time; one more is answered with status 429 until another has ended."""
    max_body_bytes: PositiveInt = 32 * 2**20
    """Maximum size of a request; a larger one is answered with status 413."""
    drain_seconds: Seconds = 5.0
    """How long the end of a run waits for calls in progress."""
