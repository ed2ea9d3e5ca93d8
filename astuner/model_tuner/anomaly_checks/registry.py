"""The checks by name."""

from __future__ import annotations

from collections.abc import Iterable

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer
from astuner.model_tuner.anomaly_checks.characters import BrokenCharacters
from astuner.model_tuner.anomaly_checks.languages import LanguageSwitch
from astuner.model_tuner.anomaly_checks.letters import RandomLetters
from astuner.model_tuner.anomaly_checks.repetition import Repetition
from astuner.model_tuner.anomaly_checks.scripts import MixedScripts
from astuner.model_tuner.anomaly_checks.tool_calls import WrongToolcall
from astuner.model_tuner.anomaly_checks.words import WordSalad

_CHECKS = (WrongToolcall(), BrokenCharacters(), Repetition(), RandomLetters(), WordSalad(), MixedScripts(),
           LanguageSwitch())  # fmt: skip

CHECKS: dict[str, AnomalyCheck] = {check.name: check for check in _CHECKS}
"""The checks by their names in `rollout.compute_madness_checklist`, in the order in which they run."""

NONSENSE = ("broken_characters", "repetition", "random_letters", "word_salad", "mixed_scripts")
"""The checks that the name `nonsense` selects."""


def find_anomaly(answer: CheckedAnswer, checklist: Iterable[str]) -> tuple[str, str] | None:
    """Return the name of the first check that an answer fails, with the fault's description; None for a good answer.

    Args:
        answer: The answer.
        checklist: Names of checks, or `nonsense` for those in `NONSENSE`.

    Raises:
        KeyError: If there is no check of a name.
    """
    names = {each for name in checklist for each in (NONSENSE if name == "nonsense" else (name,))}
    if unknown := names - CHECKS.keys():
        raise KeyError(f"there is no anomaly check {min(unknown)!r}; expected nonsense or one of {', '.join(CHECKS)}")
    for name, check in CHECKS.items():
        fault = check.find(answer) if name in names else None
        if fault is not None:
            return name, fault
    return None
