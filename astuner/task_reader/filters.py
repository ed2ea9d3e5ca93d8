"""Filters that leave out tasks when they are read; the difficulty filter acts during training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from loguru import logger

from astuner.config.task_selection import (
    DifficultyFilter,
    DuplicateFilter,
    FunctionFilter,
    LengthFilter,
    RegexFilter,
    TaskFilter,
)
from astuner.errors import AstunerError, PluginError, TaskDataError, describe_error, short_repr, shorten
from astuner.plugin import load_function, raised_at
from astuner.schema import Task, TaskSet
from astuner.task_reader.reader import describe_left_out

Causes = list[str | None]
"""For each task, why it is left out; None if it stays."""

# A letter of Chinese, Japanese or Korean, a word, or a symbol: "3 + 4" and "3 - 4" differ.
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])\w)+|[^\w\s]")


def apply_filters(
    tasks: TaskSet, filters: Sequence[TaskFilter], *, count_tokens: Callable[[str], int], search: Sequence[Path]
) -> TaskSet:
    """Return the tasks that pass all filters, with the number of the others by cause.

    Args:
        filters: section `task_reader.filters`. They are applied in order, each to what the one before it kept.
        count_tokens: counts the tokens in a text.
        search: the folders in which to search for `package.module->function`.

    Raises:
        PluginError: a function cannot be loaded, or datasketch is not installed.
        TaskDataError: a function failed, no task has the field of a regular expression, or no training task is left.
    """
    left_out: Counter[str] = Counter()
    training, validation = list(tasks.training), list(tasks.validation)
    for entry in filters:
        if isinstance(entry, DifficultyFilter):
            continue
        find = _finder(entry, count_tokens, search)
        training = _kept(training, find(training), left_out)
        if entry.validation:
            validation = _kept(validation, find(validation), left_out)
    if left_out:
        logger.info("filters left out {}", describe_left_out(left_out))
    if not training:
        raise TaskDataError(
            f"the filters left out all training tasks: {describe_left_out(left_out)}. Change "
            "astuner.task_reader.filters."
        )
    if empty := tasks.weights.keys() - {task.source for task in training}:
        logger.warning(
            "the filters left out all training tasks of {}; the mixture's other readers take its share",
            " and of ".join(sorted(empty)),
        )
    return replace(tasks, training=tuple(training), validation=tuple(validation), left_out=dict(left_out))


def _kept(tasks: Sequence[Task], causes: Causes, left_out: Counter[str]) -> list[Task]:
    left_out.update(cause for cause in causes if cause is not None)
    return [task for task, cause in zip(tasks, causes, strict=True) if cause is None]


def _finder(
    entry: LengthFilter | DuplicateFilter | RegexFilter | FunctionFilter,
    count_tokens: Callable[[str], int],
    search: Sequence[Path],
) -> Callable[[Sequence[Task]], Causes]:
    """Return the function that finds the tasks that a filter leaves out."""
    match entry:
        case LengthFilter():
            measure = count_tokens if entry.unit == "tokens" else len

            def cause(length: int) -> str | None:
                if length < entry.min:
                    return f"shorter than {entry.min} {entry.unit}"
                is_longer = entry.max is not None and length > entry.max
                return f"longer than {entry.max} {entry.unit}" if is_longer else None

            return lambda tasks: [cause(measure(prompt_text(task))) for task in tasks]
        case DuplicateFilter():
            return lambda tasks: find_duplicates(tasks, entry)
        case RegexFilter():
            return lambda tasks: _matches(tasks, entry)
        case FunctionFilter():
            function = load_function(entry.function, search=search)
            return lambda tasks: [_rejected(task, function, entry.function) for task in tasks]


def prompt_text(task: Task) -> str:
    """Return the text of a task's messages and its question, one per line."""
    texts: list[str] = []
    for message in task.init_messages:
        content = message.get("content") or ""
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]
    return "\n".join(text for text in (*texts, task.main_query) if text)


def find_duplicates(tasks: Sequence[Task], entry: DuplicateFilter) -> Causes:
    """Find the tasks that are similar to an earlier one that stays; return the cause for each, or None.

    MinHash (Broder, "On the resemblance and containment of documents", 1997) with locality-sensitive hashing finds
    candidates. The exact Jaccard similarity decides.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ModuleNotFoundError as error:
        raise PluginError(
            f"the filter deduplicate needs package {error.name}, which is not installed: pip install 'astuner[dedup]'"
        ) from error
    # As few candidates as possible, but at least 99% of the pairs whose similarity is the threshold.
    count = entry.permutations
    misses = {rows: (1 - entry.threshold**rows) ** (count // rows) for rows in range(1, count // 2 + 1)}
    rows = max((rows for rows, share in misses.items() if share <= 0.01), default=1)
    index = MinHashLSH(num_perm=count, params=(count // rows, rows))
    kept: list[frozenset[str]] = []
    causes: Causes = []
    for task in tasks:
        words = _WORD.findall(prompt_text(task).lower())
        starts = range(max(1, len(words) - entry.ngram + 1))
        grams = frozenset(" ".join(words[start : start + entry.ngram]) for start in starts)
        sketch = MinHash(num_perm=count, seed=1)
        sketch.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])
        candidates = [kept[other] for other in index.query(sketch)]
        if any(len(grams & other) / len(grams | other) >= entry.threshold for other in candidates):
            causes.append(f"similar to an earlier task (threshold {entry.threshold:g})")
        else:
            index.insert(len(kept), sketch, check_duplication=False)
            kept.append(grams)
            causes.append(None)
    return causes


def _matches(tasks: Sequence[Task], entry: RegexFilter) -> Causes:
    is_attribute = entry.field in ("main_query", "task_id", "source")
    found = [getattr(task, entry.field) if is_attribute else task.metadata.get(entry.field) for task in tasks]
    values = [None if value is None else str(value) for value in found]
    if tasks and all(value is None for value in values):
        names = sorted({name for task in tasks for name in task.metadata})
        raise TaskDataError(
            f"astuner.task_reader.filters: no task has the field {short_repr(entry.field)} of the filter regex; "
            f"expected main_query, task_id, source or a metadata field: "
            f"{shorten(', '.join(names), 1000) or 'none'}."
        )
    pattern, keeps = re.compile(entry.pattern), entry.action == "keep"
    cause = f"{entry.field} {'does not match' if keeps else 'matches'} {entry.pattern!r}"
    matching = (value is not None and pattern.search(value) is not None for value in values)
    return [None if matches is keeps else cause for matches in matching]


def _rejected(task: Task, function: Callable[[Task], object], path: str) -> str | None:
    where = f"astuner.task_reader.filters: {path}, called with task {short_repr(task.task_id)},"
    try:
        kept = function(task)
    except AstunerError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskDataError(f"{where} raised {describe_error(error)} (at {raised_at(error)}).") from error
    if not isinstance(kept, bool):
        raise TaskDataError(
            f"{where} returned {short_repr(kept)}; expected True to keep the task or False to leave it out."
        )
    return None if kept else f"rejected by {path}"
