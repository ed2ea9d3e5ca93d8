"""The interface of the anomaly checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from astuner.model_tuner.codec import ParsedAnswer
from astuner.schema import Message

WINDOW = 400
"""Length of a window, in characters. The frequencies of pairs of letters are stable in it."""


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """An answer of the model, as the checks see it.

    Attributes:
        text: The decoded completion, with special tokens.
        parsed: The parsed completion.
        messages: The messages of the request, to which the model answered.
    """

    text: str
    parsed: ParsedAnswer
    messages: Sequence[Message] = ()


class AnomalyCheck(ABC):
    """Finds one kind of degenerate output. A check has no state, so that one object serves all episodes.

    Attributes:
        name: The name of the check in `rollout.compute_madness_checklist`.
    """

    name: ClassVar[str]

    @abstractmethod
    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a description of the fault with an excerpt, or None if the answer has none."""


def windows(text: str) -> Iterator[str]:
    """Yield overlapping windows that cover a text, so that a fault after a normal start is found."""
    for start in range(0, max(len(text) - WINDOW // 2, 1), WINDOW // 2):
        yield text[start : start + WINDOW]
