"""Redaction of secrets in everything that a run writes and prints.

A secret is

- the value of an environment variable whose name indicates a secret (`DASHSCOPE_API_KEY`, `PGPASS`), and each part if
  the value joins several with `|`, `,` or `;`;
- the value of a configuration key or command-line option with such a name;
- a text in a secret's format: a well-known service's key, credentials in a URL or a header (see `formats`).

Values of variables with fewer than 8 characters (6 in a known format) are not redacted, because they are likely to be
ordinary words.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import quote, quote_plus, urlsplit

from astuner.system.redaction.formats import is_secret_setting, is_secret_variable, secret_spans

REDACTED = "[redacted]"
Listener = Callable[[list[str]], None]
_MIN_LENGTH = 8
_MIN_LENGTH_OF_FORMAT = 6

_SECRET_VALUE = re.compile(
    r"(sk-|hf_|gsk_|xai-|r8_|SG\.|ya29\.|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|AKIA|AIza|eyJ)\S+"
)
_USER_OPTIONS = ("-u", "--user", "--proxy-user")
_HEADER_OPTIONS = ("-H", "--header", "--headers")
_SEPARATORS = re.compile(r"[|,;\r\n]")
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


class Redactor:
    """Replaces a fixed set of secrets, and texts in a known key format, with `[redacted]`."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self.secrets = sorted(set(secrets))

    def __call__(self, text: str, start: int = 0) -> str:
        """Return `text` from `start` on without secrets; the part before it is only context."""
        # All are searched in the original text, so that overlapping secrets are removed completely.
        spans = [span for secret in self.secrets if secret in text for span in _occurrences(secret, text)]
        spans += secret_spans(text)
        pieces, end = [], start
        for begin, stop in sorted(spans):
            if stop > start and (begin >= end or end == start):
                pieces += [text[end : max(begin, start)], REDACTED]
            end = max(end, stop)
        return "".join([*pieces, text[end:]])


def _occurrences(secret: str, text: str) -> Iterator[tuple[int, int]]:
    start = text.find(secret)
    while start >= 0:
        yield start, start + len(secret)
        start = text.find(secret, start + 1)


class _EnvironmentWatch:
    """Provides a redactor for the current environment and rebuilds it when the environment changes.

    It remembers all secrets, because programs may read a key and then remove it from the environment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: Mapping[bytes, bytes] = {}
        self._secrets_seen: set[str] = set()
        self._redactor = Redactor(())
        self._listeners: list[Listener] = []

    def learn(self, secrets: set[str]) -> None:
        with self._lock:
            self._add(secrets)

    def redactor(self) -> Redactor:
        """Return a redactor for the environment's secrets; use one for a batch of texts."""
        environment = dict(os.environb)
        with self._lock:
            if environment != self._environment:
                self._environment = environment
                self._add(secrets_in(os.environ))
            return self._redactor

    def _add(self, secrets: set[str]) -> None:
        if not secrets <= self._secrets_seen:
            self._secrets_seen |= secrets
            self._redactor = Redactor(tuple(self._secrets_seen))
            for listener in self._listeners:
                listener(sorted(self._secrets_seen))

    def stop_listening(self) -> None:
        """Call no listener any more, in a process that was forked from the one whose listeners they are."""
        self._listeners.clear()

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """During the block, call `listener` with all known secrets, immediately and whenever there are more."""
        self.redactor()
        with self._lock:
            listener(sorted(self._secrets_seen))
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)


_watch = _EnvironmentWatch()


current_redactor, listening_for_secrets, stop_listening = _watch.redactor, _watch.listening, _watch.stop_listening


def learn_secrets(environment: Mapping[str, str]) -> None:
    """Redact also the secrets in the environment of another process."""
    _watch.learn(secrets_in(environment))


def learn_secret_settings(tree: object) -> None:
    """Redact the secrets among the settings in `tree` (see `redact_settings`) in all later texts, too."""
    _watch.learn({form for value in _secret_values(tree) if _is_distinctive(value) for form in _encodings(value)})


def secret_variables() -> dict[str, str]:
    """Return the environment variables that hold secrets, for `learn_secrets` in another process."""
    return {name: value for name, value in os.environ.items() if secrets_in({name: value})}


def redact(text: str) -> str:
    """Return `text` with every secret replaced with `[redacted]`."""
    return current_redactor()(text)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets.

    In addition to `redact`, this removes every value of an option or key whose name indicates a secret:
    `--api-key VALUE`, `--api-key=VALUE`, `astuner.some.api_key=VALUE`, `-H "Authorization: VALUE"`.
    """
    redactor = current_redactor()
    return [redactor(shown) + (REDACTED if secret else "") for shown, secret in _split_secrets(argv)]


def redact_settings(tree: object) -> object:
    """Return a tree of settings (mappings, lists and values, as read from YAML) without secrets.

    In addition to `redact`, this removes values under keys whose names indicate a secret (`api_key: …`), and the
    secrets in command lines, whether written as a text or as a list of words.
    """
    redactor = current_redactor()

    def clean(value: object, name: str) -> object:
        if isinstance(value, Mapping):
            return {
                redactor(key) if isinstance(key, str) else key: clean(item, str(key)) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            words = redact_argv(value) if _is_command(value) else value
            return [clean(item, name) for item in words]
        if _is_secret(name, value):
            return REDACTED
        if isinstance(value, str):
            for secret in _command_secrets(value):
                value = value.replace(secret, REDACTED)
            return redactor(value)
        return value

    return clean(tree, "")


def _is_secret(name: str, value: object) -> bool:
    is_value = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return is_value and is_secret_setting(name.rpartition(".")[2])


def _is_command(value: Sequence[object]) -> bool:
    return all(isinstance(item, str) for item in value)


def _secret_values(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secret_values(item, str(key))
    elif isinstance(value, list | tuple):
        if _is_command(value):
            yield from (secret for _, secret in _split_secrets(value))
        for item in value:
            yield from _secret_values(item, name)
    elif _is_secret(name, value):
        yield str(value)
    elif isinstance(value, str):
        yield from _command_secrets(value)
        yield from (value[start:end] for start, end in secret_spans(value))


def _command_secrets(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        words = text.split()
    return [secret for _, secret in _split_secrets(words) if secret]


def _split_secrets(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Split each word of a command line into the part before a secret and the secret ("" if it contains none)."""
    option = ""
    for word in argv:
        name, equals, value = word.partition("=")
        header, _, content = word.partition(":")
        if is_secret_setting(option.lstrip("-")) or (option in _USER_OPTIONS and ":" in word):
            yield "", word
        elif equals and " " not in name and is_secret_setting(name.lstrip("-").rpartition(".")[2]):
            yield f"{name}=", value
        elif option in _HEADER_OPTIONS and is_secret_setting(header):
            yield f"{header}: ", content.strip().rpartition(" ")[2]
        else:
            yield word, ""
        option = word if word.startswith("-") and not equals else ""


def _is_distinctive(text: str) -> bool:
    """Return whether a value is unlikely to be an ordinary word or number that occurs in other texts."""
    if len(text) >= _MIN_LENGTH:
        return True
    is_mixed = any(map(str.isalpha, text)) and any(map(str.isdecimal, text))
    return len(text) >= _MIN_LENGTH_OF_FORMAT and is_mixed


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets among the values of `environment`, in each encoding that programs use in their output."""
    candidates: set[str] = set()
    for name, value in environment.items():
        # An existing path is not a secret (SSH_AUTH_SOCK). Redacting it would remove file names from tracebacks.
        if is_secret_variable(name) and not (value.startswith("/") and os.path.exists(value)):
            candidates.update((value, *_SEPARATORS.split(value)))
        else:
            candidates.update(part for part in _SEPARATORS.split(value) if _SECRET_VALUE.fullmatch(part.strip()))
        candidates.update(value[start:end] for start, end in secret_spans(value))
        if "://" in value:
            with suppress(ValueError):
                candidates.add(urlsplit(value).password or "")
    secrets = set()
    for text in map(str.strip, candidates):
        if len(text) >= (_MIN_LENGTH_OF_FORMAT if _SECRET_VALUE.fullmatch(text) else _MIN_LENGTH):
            secrets |= _encodings(text)
    return secrets


def _encodings(text: str) -> set[str]:
    """Return `text` unchanged and as in JSON, a Python repr, a URL, hexadecimal digits and Base64."""
    escapes: tuple[Callable[[str], str], ...] = (
        lambda value: json.dumps(value)[1:-1],
        lambda value: repr(value)[1:-1],
        lambda value: quote(value, safe="", errors="replace"),
        lambda value: quote_plus(value, errors="replace"),
    )
    data = text.encode("utf-8", "surrogateescape")
    return {text, *(escape(text) for escape in escapes), data.hex(), data.hex().upper(), *_base64_forms(data)}


def _base64_forms(data: bytes) -> Iterator[str]:
    """Yield the Base64 of `data` at each position (three in all) that it may have within other data."""
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + data).decode()
        # Only the characters that no other byte determines.
        core = encoded[-(-offset * 8 // 6) : (offset + len(data)) * 8 // 6]
        yield core
        yield core.translate(_URL_SAFE)


_URL_SAFE = str.maketrans("+/", "-_")


class StreamRedactor:
    """Redacts a stream of text. `feed` returns complete lines. `flush` returns an unfinished line."""

    def __init__(self, redactor: Callable[[], Redactor]) -> None:
        """Create a stream; `redactor` returns the current one."""
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
