"""Redaction of a text that arrives in pieces, with secrets split across them."""

from __future__ import annotations

import re
from collections.abc import Callable

from astuner.system.redaction.redactor import Redactor

_MAX_HELD = 65536
_MAX_CONTEXT = 4096
_MIN_PREFIX = 4
_BEGIN_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----")
_END_KEY = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----")
# Matches the end of a line that may be the beginning of a secret: a key in a known format, credentials in a URL, a
# value after the name of a secret, or a key file.
_UNFINISHED = re.compile(
    r"(?i)(?:(?:key|token|secret|pass|passw|pwd|auth|authorization|cookie|sig|cred)[\w-]{0,24}[\"']?\s{0,3}[:=]\s{0,3}"
    r"(?:(?:basic|bearer|token)\s+)?[\"']?[^\s\"']|(?:bearer|basic)\s+|://[^/\s]|-----BEGIN"
    r"|\b(?:c?sk-|[prs]k_|whsec_|gsk_|xai-|r8_|tgp_v1_|fw_|pplx-|tvly-|nvapi-|hf_|api_org_|gh[oprsu]_|github_pat_"
    r"|gl[a-z]{2,5}-|xox[a-z]-|xapp-|A[KS]IA|AIza|ya29\.|GOCSPX-|SG\.|npm_|pypi-|dckr_|do[opr]_v1_|shp[a-z]{2}_|hv[sbr]\."
    r"|ntn_|lin_|eyJ))[^\s\"']*$"
)


class StreamRedactor:
    """Redacts a stream of text. `feed` returns complete lines. `flush` returns an unfinished line."""

    def __init__(self, redactor: Callable[[], Redactor]) -> None:
        """Create a stream.

        Args:
            redactor: returns the current redactor.
        """
        self._redactor = redactor
        self._context = ""  # the part of the unfinished line that was returned
        self._held = ""

    @property
    def holds_text(self) -> bool:
        """Whether the stream holds text that it has not returned yet."""
        return self._held != ""

    def feed(self, text: str) -> str:
        """Add text, and return the complete lines, redacted. A private key is held until it is complete."""
        self._held += text
        end = max(self._held.rfind("\n"), self._held.rfind("\r")) + 1
        begin = next(reversed([*_BEGIN_KEY.finditer(self._held)]), None) if "PRIVATE KEY" in self._held else None
        if begin is not None and len(self._held) < _MAX_HELD and not _END_KEY.search(self._held, begin.end()):
            end = min(end, begin.start())
        if len(self._held) - end > _MAX_HELD:
            end = len(self._held)
        return self._take(end)

    def flush(self, *, patient: bool) -> str:
        """Return the unfinished line, redacted. An end that may be the beginning of a secret is held back.

        Args:
            patient: Whether to hold back every possible beginning of a secret. Otherwise, only the beginning of a known
                secret is held back.
        """
        if patient and _BEGIN_KEY.search(self._held):
            return ""
        end = len(self._held)
        for secret in self._redactor().secrets:
            for length in range(min(len(secret) - 1, len(self._held)), _MIN_PREFIX - 1, -1):
                if self._held.endswith(secret[:length]):
                    end = min(end, len(self._held) - length)
                    break
        if patient and (match := _UNFINISHED.search(self._held)):
            end = min(end, match.start())
        return self._take(end)

    def finish(self) -> str:
        """Return the remaining text, redacted."""
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        if not end:
            return ""
        text, self._held = self._context + self._held[:end], self._held[end:]
        clean = self._redactor()(text, len(self._context))
        line = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._context = text[max(line, len(text) - _MAX_CONTEXT) :]
        return clean
