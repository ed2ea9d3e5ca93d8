"""The advantages that an episode's calls were trained with, by agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from astuner.run_record import RecordedEpisode, call_advantages
from astuner.schema import LlmCall


def advantages_of_calls(recorded: RecordedEpisode) -> dict[str, float]:
    """Return the advantage of each trained call by its id; in a record without such, that of the episode for each."""
    if recorded.updates:
        return call_advantages(recorded.episode.samples, recorded.updates)
    whole = recorded.labels.advantage
    if whole is None:
        return {}
    return {span.call_id: whole for sample in recorded.episode.samples for span in sample.spans}


def by_agent(calls: Iterable[LlmCall], advantages: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return for each agent among `calls` how many calls it has, and the least and the most of their advantages.

    Agents of which nothing was trained have None for both.
    """
    found: dict[str, list[float | None]] = {}
    for call in calls:
        found.setdefault(call.agent_name, []).append(advantages.get(call.call_id))
    rows = []
    for agent, given in sorted(found.items()):
        known = [advantage for advantage in given if advantage is not None]
        rows.append(
            {"agent": agent, "calls": len(given), "least": min(known, default=None), "most": max(known, default=None)}
        )
    return rows
