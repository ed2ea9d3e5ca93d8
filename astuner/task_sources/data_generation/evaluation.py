"""The filter `llm_evaluate`: keeps the rows of training data that fulfil rubrics."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from loguru import logger

from astuner.config.task_sources import LlmEvaluateFilter
from astuner.helper_llm.client import LlmClient, NoAnswer
from astuner.task_sources.data_generation.questions import KeptRow, evaluation_request

Row = Mapping[str, Any]
_REJECTED = "rejected by llm_evaluate"
_UNDECIDED = "that llm_evaluate could not decide"


async def evaluate_rows(
    client: LlmClient, rows: Sequence[Row], filters: Sequence[LlmEvaluateFilter], left_out: Counter[str]
) -> list[Row]:
    """Return the rows that all filters keep. A row about which the helper model gives no decision is left out.

    Args:
        client: the helper model.
        rows: tasks or transcripts.
        filters: the filters; each is applied to the rows that the previous filter kept.
        left_out: the causes are added to it.

    Raises:
        JudgeUnavailableError: the endpoint has rejected all keys.
        JudgeBudgetError: the budget is used up.
    """
    kept = list(rows)
    for entry in filters:
        if entry.enabled:
            causes = await asyncio.gather(*(_cause(client, row, entry) for row in kept))
            left_out.update(cause for cause in causes if cause)
            kept = [row for row, cause in zip(kept, causes, strict=True) if not cause]
    return kept


async def _cause(client: LlmClient, row: Row, entry: LlmEvaluateFilter) -> str | None:
    shown = {name: value for name, value in row.items() if name not in ("task_id", "source")}
    messages = evaluation_request(entry.custom_rubrics, json.dumps(shown, ensure_ascii=False, indent=1))
    try:
        answer = (await client.ask(messages, KeptRow)).value
    except NoAnswer as error:
        logger.warning("llm_evaluate: no decision on {}: {}", row.get("task_id", "a row"), error)
        return _UNDECIDED
    logger.debug("llm_evaluate: {} {}: {}", "keep" if answer.keep else "drop", row.get("task_id", ""), answer.reason)
    return None if answer.keep else _REJECTED
