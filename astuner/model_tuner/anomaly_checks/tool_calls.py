"""Malformed tool calls."""

from __future__ import annotations

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer


class WrongToolcall(AnomalyCheck):
    """Finds tool calls that cannot be parsed."""

    name = "wrong_toolcall"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault with the first malformed tool call."""
        malformed = answer.parsed.malformed
        return f"malformed tool call: {malformed[0][:200]!r}" if malformed else None
