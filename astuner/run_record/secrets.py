"""Keeps keys and tokens out of everything that a run writes.

A secret is the value of an environment variable whose name speaks of one (`DASHSCOPE_API_KEY`, `HF_TOKEN`,
`DB_PASSWORD`, …), each part of a value that joins several by `|`, `,` or `;`, and any text in one of the formats that
well-known services give their keys (`sk-…`, `hf_…`, `ghp_…`). Values of fewer than 8 characters (6 for those
in such a format) are left alone: they are too likely to be ordinary words.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import quote, quote_plus, urlsplit

REDACTED = "[redacted]"
_MIN_LENGTH = 8
_MIN_LENGTH_IN_FORMAT = 6

# AUTHOR and TOKENIZER are the two innocent words that variables of every developer's machine contain.
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!I))|COOKIE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(sk-|hf_|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|AKIA|AIza|eyJ)\S+")
_SEPARATORS = re.compile(r"[|,;\r\n]")

# Each format beside a literal that any match contains: looking for the literal first keeps long texts cheap.
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

# `--api-key VALUE` and `api_key=VALUE` on a command line, whatever the value looks like.
_SECRET_OPTION = re.compile(
    r"(api[_-]?key|access[_-]?key|password|passphrase|secret|credential|(access|auth|api|hf)[_-]?token)s?$",
    re.IGNORECASE,
)


class Redactor:
    """Replaces a fixed set of secrets, and everything that has the format of a known key, by `[redacted]`."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = sorted(set(secrets))

    def __call__(self, text: str) -> str:
        """Return `text` without secrets."""
        # All are looked for in the text as it is: of two that overlap, neither must leave a rest of the other.
        spans = [span for secret in self._secrets if secret in text for span in _places(secret, text)]
        spans += [m.span() for literal, pattern in _FORMATS if literal in text for m in pattern.finditer(text)]
        pieces, end = [], 0
        for start, stop in sorted(spans):
            if start >= end:
                pieces += [text[end:start], REDACTED]
            end = max(end, stop)
        return "".join([*pieces, text[end:]]) if spans else text


def _places(secret: str, text: str) -> Iterator[tuple[int, int]]:
    start = text.find(secret)
    while start >= 0:
        yield start, start + len(secret)
        start = text.find(secret, start + 1)


class _EnvironmentWatch:
    """Gives a redactor for the present environment, rebuilt only when the environment has changed.

    A secret once seen stays known: programs read a key and then drop it from the environment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: Mapping[bytes, bytes] = {}
        self._known: set[str] = set()
        self._redactor = Redactor(())

    def learn(self, environment: Mapping[str, str]) -> None:
        with self._lock:
            self._known |= secrets_in(environment)
            self._redactor = Redactor(tuple(self._known))

    def redactor(self) -> Redactor:
        environment = dict(os.environb)
        with self._lock:
            if environment != self._environment:
                self._environment = environment
                self._known |= secrets_in(os.environ)
                self._redactor = Redactor(tuple(self._known))
            return self._redactor


_watch = _EnvironmentWatch()


def current_redactor() -> Redactor:
    """Return a redactor that knows the environment's secrets; take one for a batch of texts."""
    return _watch.redactor()


def learn_secrets(environment: Mapping[str, str]) -> None:
    """Have the secrets of another process's environment redacted from now on, too."""
    _watch.learn(environment)


def secret_variables() -> dict[str, str]:
    """Return the variables of this process's environment that hold secrets, for `learn_secrets` in another one."""
    return {name: value for name, value in os.environ.items() if secrets_in({name: value})}


def redact(text: str) -> str:
    """Return `text` with every secret replaced by `[redacted]`."""
    return current_redactor()(text)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets.

    Beside what `redact` finds, the value after an option or key that is named like a secret goes, since it need not
    be in the environment: `--api-key VALUE`, `--api-key=VALUE`, `astuner.some.api_key=VALUE`.
    """
    redactor = current_redactor()
    shown: list[str] = []
    value_is_secret = False
    for argument in argv:
        name, equals, value = argument.partition("=")
        named_like_a_secret = _SECRET_OPTION.search(name) is not None
        if value_is_secret:
            shown.append(REDACTED)
        elif named_like_a_secret and value:
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(redactor(argument))
        value_is_secret = named_like_a_secret and not equals and argument.startswith("-")
    return shown


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets among the values of `environment`, in every form in which programs write them."""
    found: set[str] = set()
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and not _is_existing_path(value):
            found.update((value, *_SEPARATORS.split(value)))
        elif "://" in value:
            found.add(_url_password(value))
        else:
            found.update(part for part in _SEPARATORS.split(value) if _SECRET_VALUE.fullmatch(part.strip()))
    long_enough = {text for text in map(str.strip, found) if len(text) >= _least_length(text)}
    return {form for text in long_enough for form in _written_forms(text)}


def _least_length(text: str) -> int:
    return _MIN_LENGTH_IN_FORMAT if _SECRET_VALUE.fullmatch(text) else _MIN_LENGTH


def _is_existing_path(value: str) -> bool:
    # SSH_AUTH_SOCK, GOOGLE_APPLICATION_CREDENTIALS: without this, tracebacks would lose their file names.
    return value.startswith("/") and os.path.exists(value)


def _url_password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""


def _written_forms(text: str) -> set[str]:
    """Return `text` as it stands, and as it looks inside JSON, a Python repr and a URL."""
    escapes: tuple[Callable[[str], str], ...] = (
        lambda value: json.dumps(value)[1:-1],
        lambda value: repr(value)[1:-1],
        lambda value: quote(value, safe="", errors="replace"),
        lambda value: quote_plus(value, errors="replace"),
    )
    return {text, *(escape(text) for escape in escapes)}
