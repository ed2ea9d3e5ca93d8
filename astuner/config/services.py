"""Sections on servers: `services`, additional processes that a run needs, `gateway`, and `task_judge.llm`."""

from __future__ import annotations

import os
import re
import shlex
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from astuner.config.section import Count, NonNegativeInt, PositiveInt, Seconds, Section, key
from astuner.errors import ConfigError, JudgeBudgetError

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


def _api_address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("expected an address such as http://127.0.0.1:8000/v1")
    return url


def _number_as_text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


ServiceName = Annotated[str, AfterValidator(_service_name)]
HttpAddress = Annotated[str, AfterValidator(http_address)]
ApiAddress = Annotated[str, AfterValidator(_api_address)]
EnvValue = Annotated[str, BeforeValidator(_number_as_text)]
Price = Annotated[float, Field(ge=0, le=1e6)]


class HealthConfig(Section):
    """A service's `health`: how astuner checks that it is ready; set at most one key."""

    http: HttpAddress | None = None
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


def api_key(setting: str, variable: str | None) -> str | None:
    """Return the value of the environment variable that `setting` names; None if it names no variable.

    Raises:
        ConfigError: the variable is not set or empty.
    """
    value = os.environ.get(variable) if variable else None
    if variable and not value:
        raise ConfigError(
            f"{setting} names the environment variable {variable}, which is not set; export it, or remove api_key_env "
            "if the server needs no key"
        )
    return value


class JudgeLlmConfig(Section):
    """`task_judge.llm`: the helper model's endpoint, and the limits on its use."""

    base_url: HttpAddress | None = key(None, resume="path")
    """An OpenAI-compatible endpoint. Default: OPENAI_BASE_URL, else the provider of the key."""
    api_key_env: str | None = key(None, resume="any")
    """Environment variable with the keys, separated by |. Default: DASHSCOPE_API_KEY, else OPENAI_API_KEY."""
    response_format: Literal["json_schema", "json_object", "text"] = "json_object"
    """How a request asks for JSON; text is for servers without response_format. Every answer is validated."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of the helper model."""
    request_timeout: Seconds = key(30.0, resume="any")
    """Time limit of one request, in seconds."""
    deadline: Seconds = key(50.0, resume="any")
    """Time limit for one question with all its retries, in seconds."""
    max_retries: NonNegativeInt = key(4, resume="any")
    """Maximum number of retries for a question after endpoint errors."""
    max_reasks: NonNegativeInt = key(2, resume="any")
    """Maximum number of further requests after answers that do not have the requested form."""
    max_concurrent_requests: Count = key(16, resume="any")
    """Maximum number of concurrent requests; on verl and trinity, per process."""
    cache: bool = key(True, resume="any")
    """Use the cached answer if a question was asked before."""
    cache_dir: str | None = key(None, resume="path")
    """Folder of the cache. Default: `astuner/judge` in $XDG_CACHE_HOME or ~/.cache."""
    input_price: Price = key(0.0, resume="any")
    """Price per million prompt tokens, in any currency."""
    output_price: Price = key(0.0, resume="any")
    """Price per million answer tokens, in the same currency."""
    max_tokens: PositiveInt | None = key(None, resume="any")
    """Stop the run after this number of prompt and answer tokens; null for no limit."""
    max_cost: Annotated[float, Field(gt=0, le=1e9)] | None = key(None, resume="any")
    """Stop the run at this cost, by input_price and output_price; null for no limit."""


def check_budget(tokens: float, cost: float, config: JudgeLlmConfig) -> None:
    """Check how much the judge's LLM has been used against the configured budget.

    Raises:
        JudgeBudgetError: the budget is used up.
    """
    if config.max_tokens is not None and tokens >= config.max_tokens:
        raise JudgeBudgetError(
            f"the judge's LLM has used {tokens:,.0f} tokens, and task_judge.llm.max_tokens allows "
            f"{config.max_tokens:,}; raise it to continue the run"
        )
    if config.max_cost is not None and cost >= config.max_cost:
        raise JudgeBudgetError(
            f"the judge's LLM has cost {cost:.4f}, and task_judge.llm.max_cost allows {config.max_cost:g}; raise it to "
            "continue the run"
        )
