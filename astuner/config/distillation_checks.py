"""Checks of `trainer_common.distillation`."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.config.algorithms import ALGORITHMS
from astuner.config.distillation import SELF, TEACHER_KEY, is_server
from astuner.config.keys import parts
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig


def distillation_problems(run: AstunerConfig) -> Iterator[Problem]:
    """Yield the contradictions between the keys of `trainer_common.distillation` and between them and other keys."""
    distillation, teacher = run.trainer_common.distillation, f"astuner.{TEACHER_KEY}"
    if distillation.teacher is None:
        return
    algorithm = run.trainer_common.algorithm.adv_estimator
    rule = ALGORITHMS[algorithm].reinforcement
    if rule is not None and rule.loss.by_call:
        yield _problem(
            f"{teacher} gives each token an advantage, and the loss of {algorithm} has one advantage per answer; write "
            "trainer_common.algorithm: grpo, or another algorithm whose loss is computed per token",
            teacher,
            "astuner.trainer_common.algorithm.adv_estimator",
        )
    if distillation.teacher == SELF and distillation.hint is None:
        yield _problem(
            f"{teacher} is self and there is no hint, so the teacher is the model itself and teaches nothing; add "
            '`hint: "The correct answer is {answer}."` under `distillation:`, or name another teacher',
            teacher,
            "astuner.trainer_common.distillation.hint",
        )
    if is_server(distillation.teacher) and run.rollout.temperature not in (0.0, 1.0):
        yield _problem(
            f"{teacher} is a server, which scores tokens at temperature 1, and rollout.temperature is "
            f"{run.rollout.temperature:g}; write temperature: 1.0 under `rollout:`, or name the folder of a model",
            teacher,
            "astuner.rollout.temperature",
        )


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, keys=tuple(parts(key) for key in keys))
