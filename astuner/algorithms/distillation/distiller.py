"""Advantages from a teacher.

The loss of on-policy distillation is the reverse KL divergence from the model π to the teacher, on text that the model
has sampled (Agarwal et al., 2023, arXiv:2306.13649; Gu et al., 2023, arXiv:2306.08543). Its estimate at a sampled
token is log π - log teacher. The negative estimate is an advantage of that token, so every algorithm with a
loss of tokens can train on it ("On-Policy Distillation", Thinking Machines Lab, 2025). The mean over the tokens of
the step is subtracted as a baseline (Williams, 1992), which reduces the variance of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from astuner.algorithms.distillation.hints import find_calls, hint_text, prompt_with_hint
from astuner.algorithms.distillation.teacher import Teacher, TeacherSequence
from astuner.algorithms.kl import LOG_RATIO_LIMIT
from astuner.algorithms.training_rows import TrainingRow
from astuner.config.distillation import DistillationConfig
from astuner.model_tuner import ChatCodec
from astuner.schema import Episode
from astuner.system.clock import timestamp


class RowTeacher(Protocol):
    """Adds a teacher's advantages to training rows."""

    def assign_to(
        self, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Return the rows with the teacher's advantages, and metrics; see `Distiller.assign_to`."""
        ...


@dataclass(frozen=True)
class Distiller:
    """Adds the teacher's advantages to training rows.

    Attributes:
        config: the section `trainer_common.distillation`.
        teacher: the teacher.
        codec: converts messages to token ids, for hints.
    """

    config: DistillationConfig
    teacher: Teacher
    codec: ChatCodec

    def assign_to(
        self, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Return the rows with the teacher's advantages: coef × (d - mean of d), where d is log teacher - log π.

        d is computed for each trained token and clipped to ± `LOG_RATIO_LIMIT`; the mean is over those of all rows.

        Args:
            rows: the rows to train, which need the logprobs of the sampler.
            episodes: the episodes of the step.

        Returns:
            The rows, and the metrics: `distillation/kl` is the mean of log π - log teacher over the trained tokens,
            in nats; `distillation/calls_without_hint` is the number of calls whose prompt cannot have the hint, which
            the teacher does not score.

        Raises:
            ModelError: the teacher cannot score the rows.
            ConfigError: the hint has a field that a task does not have.
        """
        started = timestamp()
        scored, without_hint = self._score(rows, episodes)
        differences, trained = [], []
        for row, (logprobs, is_scored) in zip(rows, scored, strict=True):
            student = np.asarray(row.old_logprobs if len(row.old_logprobs) else row.logprobs, np.float32)
            differences.append(np.clip(logprobs - student, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
            trained.append(is_scored & (np.asarray(row.train_counts) > 0))
        values = [difference[is_trained] for difference, is_trained in zip(differences, trained, strict=True)]
        mean = float(np.concatenate(values).mean()) if any(map(len, values)) else 0.0
        result = [
            replace(row, teacher_advantages=np.where(kept, self.config.coef * (each - mean), 0.0).astype(np.float32))
            for row, each, kept in zip(rows, differences, trained, strict=True)
        ]
        metrics = {"distillation/kl": -mean}
        if self.config.hint is not None:
            metrics["distillation/calls_without_hint"] = float(without_hint)
            if without_hint:
                logger.warning(
                    "the teacher did not score {} calls, because the hint does not fit at the end of their last "
                    "message (it is an answer, or has no text)",
                    without_hint,
                )
        return result, metrics | {"time/teacher": timestamp() - started}

    def close(self) -> None:
        """Free the teacher's resources."""
        self.teacher.close()

    def _score(
        self, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[tuple[NDArray[np.float32], NDArray[np.bool_]]], int]:
        """Return the teacher's logprobs [N] for each row, which of them exist, and how many calls were skipped."""
        if self.config.hint is not None:
            return self._score_with_hint(self.config.hint, rows, episodes)
        sequences = [TeacherSequence(row.token_ids, row.calls, row.temperatures) for row in rows]
        logprobs = self.teacher.logprobs(sequences)
        return [(values, np.ones(len(values), bool)) for values in logprobs], 0

    def _score_with_hint(
        self, hint: str, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[tuple[NDArray[np.float32], NDArray[np.bool_]]], int]:
        """Score each call with its own prompt, because a hint at the end of one call would be context for the next."""
        sequences, places = [], []
        scored = [(np.zeros(len(row.token_ids), np.float32), np.zeros(len(row.token_ids), bool)) for row in rows]
        skipped = 0
        for number, row in enumerate(rows):
            episode = episodes[row.episode]
            text = hint_text(hint, episode)
            calls = find_calls(episode, row.call_ids)
            for call, (start, end), temperature in zip(calls, row.calls, row.temperatures, strict=True):
                prompt = prompt_with_hint(self.codec, call, text)
                if prompt is None:
                    skipped += 1
                    continue
                answer = [int(token) for token in row.token_ids[start:end]]
                span = (len(prompt), len(prompt) + len(answer))
                sequences.append(TeacherSequence((*prompt, *answer), [span], [temperature]))
                places.append((number, start, end))
        for (number, start, end), values in zip(places, self.teacher.logprobs(sequences), strict=True):
            logprobs, is_scored = scored[number]
            logprobs[start:end] = values[len(values) - (end - start) :]
            is_scored[start:end] = True
        return scored, skipped
