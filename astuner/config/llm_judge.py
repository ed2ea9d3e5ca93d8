"""Sections on the LLM that judges ask: `task_judge.llm`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from astuner.config.section import Count, NonNegativeInt, PositiveInt, Seconds, Section, key
from astuner.config.services import http_address
from astuner.errors import JudgeBudgetError

Price = Annotated[float, Field(ge=0, le=1e6)]


def _endpoint(url: str | None) -> str | None:
    return None if url is None else http_address(url)


class JudgeLlmConfig(Section):
    """`task_judge.llm`: the helper model's endpoint, and the limits on its use."""

    base_url: Annotated[str | None, AfterValidator(_endpoint)] = key(None, resume="path")
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
    """Time limit of one question with all of its retries, in seconds."""
    max_retries: NonNegativeInt = key(4, resume="any")
    """Maximum number of retries of a question after errors of the endpoint."""
    max_reasks: NonNegativeInt = key(2, resume="any")
    """Maximum number of further requests after answers that do not have the requested form."""
    max_concurrent_requests: Count = key(16, resume="any")
    """Maximum number of concurrent requests; on verl and trinity, of one process."""
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
