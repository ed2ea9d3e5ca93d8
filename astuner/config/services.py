"""Section `services`: additional processes that a run needs."""

from __future__ import annotations

import os
import re
import shlex
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from astuner.config.section import NonNegativeInt, Seconds, Section
from astuner.errors import ConfigError

BUILT_IN_SERVICES = ("appworld", "logview", "ray", "ray-cluster")
"""Names of services that astuner can start; a file declares others."""

Port = Annotated[int, Field(ge=1, le=65535)]


def _service_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ValueError("expected a name of letters, digits, - and _ that starts with a letter, as in --with-NAME")
    if name in BUILT_IN_SERVICES:
        raise ValueError(f"expected another name: --with-{name} is built in")
    return name


def _command(command: str | list[str]) -> str | list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise ValueError(f"expected a command line ({error}); write it as a list with one item per word") from None
    if not words or not words[0]:
        raise ValueError("expected a command line, as text or as a list with one item per word")
    return command


def http_address(url: str) -> str:
    """Check that a text is the address of an HTTP server.

    Raises:
        ValueError: it is not.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, an invalid port
        usable = False
    if not usable:
        raise ValueError("expected an address such as http://127.0.0.1:8080/health")
    return url


def _number_as_text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


ServiceName = Annotated[str, AfterValidator(_service_name)]
EnvValue = Annotated[str, BeforeValidator(_number_as_text)]


class HealthConfig(Section):
    """`health` of a service: how astuner checks that it is ready; one of the keys, or neither."""

    http: Annotated[str, AfterValidator(http_address)] | None = None
    """An address that answers with a status below 400 once the service is ready."""
    port: Port | None = None
    """A port of 127.0.0.1 that accepts connections once the service is ready."""

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.http is not None and self.port is not None:
            raise ValueError("expected http or port, not both")
        return self


class ServiceConfig(Section):
    """An entry of `services`: a process that `--with-NAME` starts before the run and stops with it."""

    command: Annotated[str | list[str], AfterValidator(_command)]
    """The command line, as text or a list with one item per word, without a shell. It must stay in the foreground."""
    cwd: str | None = None
    """The folder to run it in, relative to the working directory or the YAML file; null is the working directory."""
    env: dict[str, EnvValue] = Field(default_factory=dict)
    """Environment variables in addition to those of the run."""
    ports: list[Port] = Field(default_factory=list)
    """The ports that it opens, which must be free at the start; that of `health` need not be repeated."""
    health: HealthConfig = HealthConfig()
    """How astuner checks that it is ready; without it, a service that runs for a second is ready."""
    timeout: Seconds = 60.0
    """Time limit for it to become ready, in seconds."""
    restart: bool | NonNegativeInt = False
    """How often it is restarted if it ends before the run does; true is without limit."""

    @property
    def argv(self) -> list[str]:
        """The command line as a list of words."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)


def api_key(setting: str, variable: str | None) -> str | None:
    """Return the value of the environment variable that `setting` names; None if it names no variable.

    Raises:
        ConfigError: the variable is not set or empty.
    """
    key = os.environ.get(variable) if variable else None
    if variable and not key:
        raise ConfigError(
            f"{setting} names the environment variable {variable}, which is not set; export it, or remove api_key_env "
            "if the server needs no key"
        )
    return key
