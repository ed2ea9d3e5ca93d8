"""The policy of verl's workers as its own teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astuner.algorithms.distillation import TeacherSequence
from astuner.backbone.verl.trainer import VerlTrainer


@dataclass(frozen=True)
class PolicyTeacher:
    """Scores tokens with the workers' current weights, at the run's temperature.

    Attributes:
        trainer: the started trainer.
    """

    trainer: VerlTrainer

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Score the spans; see `Teacher.logprobs`."""
        starts = [min(start for start, _ in sequence.spans) for sequence in sequences]
        scored = self.trainer.score(
            "teacher", [(sequence.token_ids, start) for sequence, start in zip(sequences, starts, strict=True)]
        )
        results = []
        for sequence, first, values in zip(sequences, starts, scored, strict=True):
            result = np.zeros(len(sequence.token_ids), np.float32)
            for start, end in sequence.spans:
                result[start:end] = values[start - first : end - first].numpy()
            results.append(result)
        return results

    def close(self) -> None:
        """Do nothing: the trainer is used until the run ends."""
