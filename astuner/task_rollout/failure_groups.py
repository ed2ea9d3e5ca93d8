"""Descriptions of failed episodes, with equal errors folded."""

from __future__ import annotations

from collections.abc import Sequence

from astuner.errors import shorten, without_variable_parts
from astuner.schema import Episode

_MAX_GROUPS = 3
_MAX_TASKS = 3
_MAX_ID = 40


def describe_failures(episodes: Sequence[Episode]) -> list[str]:
    """Return a text for each error of the failed and dropped episodes, the most frequent first.

    Errors that differ only in numbers, ids and paths count as one, which is shown as it occurred first:
    `[workflow] ValueError: no tool 4 (12 times, tasks a, b, c and 5 more)`. After three errors, the others are counted.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.status != "ok":
            groups.setdefault(without_variable_parts(f"[{episode.error_kind}] {episode.error}"), []).append(episode)
    ranked = sorted(groups.values(), key=len, reverse=True)
    texts = [_text(group) for group in ranked[:_MAX_GROUPS]]
    if others := ranked[_MAX_GROUPS:]:
        number = sum(map(len, others))
        texts.append(f"{len(others)} other errors ({number} episodes)" if len(others) > 1 else _text(others[0]))
    return texts


def _text(group: Sequence[Episode]) -> str:
    ids = [shorten(task_id, _MAX_ID) for task_id in dict.fromkeys(episode.task.task_id for episode in group)]
    more = f" and {len(ids) - _MAX_TASKS} more" if len(ids) > _MAX_TASKS else ""
    tasks = f"task{'' if len(ids) == 1 else 's'} {', '.join(ids[:_MAX_TASKS])}{more}"
    times = "" if len(group) == 1 else f"{len(group)} times, "
    return f"[{group[0].error_kind}] {group[0].error} ({times}{tasks})"
