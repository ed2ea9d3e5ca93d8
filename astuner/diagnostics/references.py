"""The tasks' reference answers, and their comparison with the episodes' answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from astuner.diagnostics.evidence import Transcript, text_of
from astuner.schema import Episode, Task

REFERENCE_FIELDS = (
    "answer",
    "reference_answer",
    "ground_truth",
    "gold",
    "target",
    "solution",
    "expected_answer",
    "expected",
    "label",
)
_ANSWER_NAMES = ("answer", "final", "prediction", "predicted", "response", "result", "output")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reference(task: Task) -> str | None:
    """Return the reference answer of a task; None if the task has none of at most 40 characters."""
    for field in REFERENCE_FIELDS:
        value = task.metadata.get(field)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            continue
        text = str(value).rpartition("####")[2]
        text = normalised((_BOXED.findall(text) or [text])[-1])
        if 0 < len(text) <= 40:
            return text
    return None


def normalised(text: str) -> str:
    """Return a text in lower case without thousands separators, currency signs, final dots and outer white space."""
    text = text.strip().strip("$").rstrip(".").replace(",", "").lower()
    return text.removesuffix(".0")


def is_number(text: str) -> bool:
    """Return whether a normalised text is a number."""
    return _NUMBER.fullmatch(text) is not None


def answer_is_right(episode: Episode, expected: str) -> bool | None:
    r"""Return whether the answer of an episode equals the reference; None if the text does not decide it.

    The answer is right if a field of the workflow's metadata, the last `\boxed{…}`, or the whole last message equals
    the reference. The answer is wrong if none of them contains the reference.
    """
    texts = list(_answers(episode))
    if not texts:
        return None
    for text in texts:
        boxed = _BOXED.findall(text)
        if normalised((boxed or [text])[-1]) == expected:
            return True
    plain = " ".join(texts).replace(",", "").lower()
    found = re.search(rf"(?<![\w.]){re.escape(expected)}(?!\w|\.\d)", plain)
    return None if found else False


def _answers(episode: Episode) -> Iterator[str]:
    named: list[Any] = [
        value for name, value in episode.metadata.items() if any(word in str(name).lower() for word in _ANSWER_NAMES)
    ]
    for value in named:
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            yield str(value)
    messages = Transcript.of(episode).messages
    if messages and messages[-1].get("role") == "assistant" and text_of(messages[-1]).strip():
        yield text_of(messages[-1])
