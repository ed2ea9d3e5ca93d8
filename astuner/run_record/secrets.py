"""Redaction of keys and tokens in everything that a run writes.

A secret is the value of an environment variable whose name indicates one (`DASHSCOPE_API_KEY`, `HF_TOKEN`,
`DB_PASSWORD`, …), each part of a value that joins several with `|`, `,` or `;`, and any text in the key format of a
well-known service (`sk-…`, `hf_…`, `ghp_…`). Values of fewer than 8 characters (6 in a known format) are not redacted,
as they are likely to be ordinary words.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from urllib.parse import quote, quote_plus, urlsplit

REDACTED = "[redacted]"
_MIN_LENGTH = 8
_MIN_LENGTH_OF_FORMAT = 6

# AUTHOR and TOKENIZER are two common words in the names of harmless variables.
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!I))|COOKIE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(sk-|hf_|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|AKIA|AIza|eyJ)\S+")
_SEPARATORS = re.compile(r"[|,;\r\n]")

# Each pattern with a literal that every match contains: searching for the literal first is fast on long texts.
_FORMATS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (literal, re.compile(pattern))
    for literal, pattern in (
        ("sk-", r"\bsk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}"),
        ("hf_", r"\bhf_[A-Za-z0-9]{16,}"),
        *((f"gh{kind}_", rf"\bgh{kind}_[A-Za-z0-9]{{16,}}") for kind in "oprsu"),
        ("github_pat_", r"\bgithub_pat_\w{20,}"),
        ("glpat-", r"\bglpat-[\w-]{16,}"),
        ("xox", r"\bxox[abeprs]-[A-Za-z0-9-]{10,}"),
        ("AKIA", r"\bAKIA[0-9A-Z]{16}\b"),
        ("AIza", r"\bAIza[\w-]{30,}"),
        ("eyJ", r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),
        ("Bearer ", r"(?<=Bearer )[A-Za-z0-9._~+/=-]{20,}"),
        ("://", r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"),
        ("PRIVATE KEY", r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
    )
)

# `--api-key VALUE` and `api_key=VALUE` on a command line, for any value.
_SECRET_OPTION = re.compile(
    r"(api[_-]?key|access[_-]?key|password|passphrase|secret|credential|(access|auth|api|hf)[_-]?token)s?$",
    re.IGNORECASE,
)


class Redactor:
    """Replaces a fixed set of secrets, and texts in a known key format, with `[redacted]`."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = sorted(set(secrets))

    def __call__(self, text: str) -> str:
        """Return `text` without secrets."""
        # All are searched in the original text, so that overlapping secrets are removed completely.
        spans = [span for secret in self._secrets if secret in text for span in _occurrences(secret, text)]
        spans += [m.span() for literal, pattern in _FORMATS if literal in text for m in pattern.finditer(text)]
        pieces, end = [], 0
        for start, stop in sorted(spans):
            if start >= end:
                pieces += [text[end:start], REDACTED]
            end = max(end, stop)
        return "".join([*pieces, text[end:]]) if spans else text


def _occurrences(secret: str, text: str) -> Iterator[tuple[int, int]]:
    start = text.find(secret)
    while start >= 0:
        yield start, start + len(secret)
        start = text.find(secret, start + 1)


class _EnvironmentWatch:
    """Provides a redactor for the current environment and rebuilds it when the environment changes.

    Secrets are remembered, as programs may read a key and then remove it from the environment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: Mapping[bytes, bytes] = {}
        self._secrets_seen: set[str] = set()
        self._redactor = Redactor(())

    def learn(self, environment: Mapping[str, str]) -> None:
        with self._lock:
            self._secrets_seen |= secrets_in(environment)
            self._redactor = Redactor(tuple(self._secrets_seen))

    def redactor(self) -> Redactor:
        environment = dict(os.environb)
        with self._lock:
            if environment != self._environment:
                self._environment = environment
                self._secrets_seen |= secrets_in(os.environ)
                self._redactor = Redactor(tuple(self._secrets_seen))
            return self._redactor


_watch = _EnvironmentWatch()


def current_redactor() -> Redactor:
    """Return a redactor for the secrets of the environment; use one for a batch of texts."""
    return _watch.redactor()


def learn_secrets(environment: Mapping[str, str]) -> None:
    """Also redact the secrets in the environment of another process."""
    _watch.learn(environment)


def secret_variables() -> dict[str, str]:
    """Return the environment variables that hold secrets, for `learn_secrets` in another process."""
    return {name: value for name, value in os.environ.items() if secrets_in({name: value})}


def redact(text: str) -> str:
    """Return `text` with every secret replaced with `[redacted]`."""
    return current_redactor()(text)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets.

    In addition to `redact`, this removes the values of options and keys whose names indicate a secret:
    `--api-key VALUE`, `--api-key=VALUE`, `astuner.some.api_key=VALUE`.
    """
    redactor = current_redactor()
    clean: list[str] = []
    value_is_secret = False
    for argument in argv:
        name, equals, value = argument.partition("=")
        is_secret_name = _SECRET_OPTION.search(name) is not None
        if value_is_secret:
            clean.append(REDACTED)
        elif is_secret_name and value:
            clean.append(f"{name}={REDACTED}")
        else:
            clean.append(redactor(argument))
        value_is_secret = is_secret_name and not equals and argument.startswith("-")
    return clean


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets among the values of `environment`, in all encodings in which programs write them."""
    candidates: set[str] = set()
    for name, value in environment.items():
        # An existing path is not a secret (SSH_AUTH_SOCK). Redacting it would remove file names from tracebacks.
        if _SECRET_NAME.search(name) and not (value.startswith("/") and os.path.exists(value)):
            candidates.update((value, *_SEPARATORS.split(value)))
        elif "://" in value:
            with suppress(ValueError):
                candidates.add(urlsplit(value).password or "")
        else:
            candidates.update(part for part in _SEPARATORS.split(value) if _SECRET_VALUE.fullmatch(part.strip()))
    secrets = set()
    for text in map(str.strip, candidates):
        if len(text) >= (_MIN_LENGTH_OF_FORMAT if _SECRET_VALUE.fullmatch(text) else _MIN_LENGTH):
            secrets |= _encodings(text)
    return secrets


def _encodings(text: str) -> set[str]:
    """Return `text` unchanged and as in JSON, a Python repr and a URL."""
    escapes: tuple[Callable[[str], str], ...] = (
        lambda value: json.dumps(value)[1:-1],
        lambda value: repr(value)[1:-1],
        lambda value: quote(value, safe="", errors="replace"),
        lambda value: quote_plus(value, errors="replace"),
    )
    return {text, *(escape(text) for escape in escapes)}
