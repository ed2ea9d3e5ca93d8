"""The interface of all teachers: token sequences in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TeacherSequence:
    """A token sequence, and the parts of it that the teacher scores.

    Attributes:
        token_ids: N token ids.
        spans: (start, end) of each part, with 1 <= start < end <= N.
        temperatures: the sampling temperature of each part; 0 is greedy sampling, which is scored as temperature 1.
    """

    token_ids: Sequence[int] | NDArray[np.int32]
    spans: Sequence[tuple[int, int]]
    temperatures: Sequence[float]


class Teacher(Protocol):
    """A model that scores tokens."""

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Return the log-probability of each token in the spans, given the tokens before it.

        Args:
            sequences: S sequences.

        Returns:
            S arrays, each [N] with the length of its sequence, and 0 outside its spans.

        Raises:
            ModelError: the teacher cannot score the sequences.
        """
        ...

    def close(self) -> None:
        """Free the teacher's resources."""
        ...
