"""Addresses of environment services, as the configuration and the tasks name them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from astuner.errors import EnvError

AUTO = "auto"
"""The address of the service that the run starts."""
TOKEN_VARIABLE = "ASTUNER_ENV_TOKEN"
"""The environment variable with the token of a service."""


@dataclass(frozen=True)
class EnvServiceAddress:
    """The address of an environment service.

    Attributes:
        url: for example `http://127.0.0.1:8080`.
        token: the token of the service; "" for none.
    """

    url: str
    token: str = field(default="", repr=False)


def service_address(url: str, started: EnvServiceAddress | None = None) -> EnvServiceAddress:
    """Return a service's address, with the token from this process's environment variable.

    Args:
        url: the address as configured.
        started: the service that the run has started, for `auto`.

    Raises:
        EnvError: there is no such service.
    """
    if url != AUTO:
        return EnvServiceAddress(url, os.environ.get(TOKEN_VARIABLE, ""))
    if started is None:
        raise EnvError(
            "env_url is auto, but no run has started the service; start one with `astuner env serve`, and set env_url "
            "to its address"
        )
    return started
