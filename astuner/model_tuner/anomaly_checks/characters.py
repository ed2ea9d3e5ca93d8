"""Broken characters."""

from __future__ import annotations

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer

_MIN_BROKEN_SHARE = 0.05


class BrokenCharacters(AnomalyCheck):
    """Finds invalid UTF-8 and control characters."""

    name = "broken_characters"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault if more than one character and a twentieth of a text are broken."""
        text = answer.text
        broken = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\n\r\t") for char in text)
        if broken > 1 and broken / len(text) > _MIN_BROKEN_SHARE:
            return f"{broken} broken characters in {len(text)}"
        return None
