"""Names of secrets: environment variables, settings, command-line options, URL parameters and headers."""

from __future__ import annotations

import re
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

# A name that ends in one of these words describes a secret, but its value is not a secret: API_KEY_ENV, TOKEN_LIMIT.
_DESCRIPTION = re.compile(
    r"at|class|cls|column|count|dir|directory|enabled|env|expires|expiry|field|file|folder|format|ids|len|"
    r"length|level|limit|limits|method|mode|n|parallelism|path|paths|policy|port|rate|required|reset|"
    r"seconds|size|sock|socket|timeout|ttl|type|version"
)
_NAME_OF_SECRET = re.compile(r"hint|id|names?|prefix|user|username")

_CONTAINED = (
    "passw|passphrase|passcode|secret(?!ar)|credential|apikey|accesskey|privatekey|authtoken|accesstoken|connstr|"
    "connectionstring|webhook"
)
_WHOLE = "pat|creds?|bearer|jwts?|dsns?|cookies?|authorization|oauth|auth|sas|signing|hmac|otp|mnemonic"
_KEYS = (
    "access|account|admin|aes|api|app|auth|client|consumer|deploy|encryption|license|master|private|rsa|secret|service|"
    "session|shared|signing|ssh|ssl|storage|subscription"
)
_TOKENS = (
    "access|admin|api|app|auth|bearer|bot|ci|client|csrf|deploy|gh|git|github|gitlab|hf|hub|huggingface|id|identity|"
    "job|npm|oauth|personal|private|pypi|refresh|sas|secret|security|service|session|slack|upload|user|vault|wandb|xsrf"
)
_SECRET_SETTING = re.compile(
    rf"(?:^|_)(?:[a-z]*(?:{_CONTAINED})[a-z]*|[a-z]*pwd|{_WHOLE}|(?:{_KEYS})_keys?|(?:{_TOKENS})_tokens?"
    r"|conn(?:ection)?_str(?:ing)?)(?=_|$)|^token$|^pass$"
    r"|(?<!forward)(?<!backward)(?<!first)(?<!second)(?<!single)(?<!one)(?<!two)(?<!multi)(?<!\bn)_pass$"
)

# In the name of a variable, every key, token and pass indicates a secret, except in these words and names.
_ENDINGS = ("key", "keys", "token", "tokens", "pass", "pwd", "creds", "jwt", "dsn", "auth")
_HARMLESS_WORD = re.compile(
    r"askpass|bypass|compass|donkey|encompass|hockey|hotkey|jockey|monkey|overpass|surpass|trespass|"
    r"turkey|turnkey|underpass|whiskey"
)
_HARMLESS_VARIABLES = ("PWD", "OLDPWD")  # the working directory
_QUANTITY = re.compile(r"max|min|num|n|total|new|per|budget|avg|mean")
_DESKTOP = re.compile(r"xdg|dbus|desktop|gnome|kde|plasma|term|wt|manager|name|tmux|screen|zellij")
_VARIABLE_WORD = re.compile(r"session|sessions|sessionid|sid|sig|signature|csrf|xsrf")
_PARAMETER = re.compile(r"keys?|tokens?|auth|pwd|(?:[a-z_]+_)?(?:sig|sign|signature)")


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, without a number at the end: `API_KEY_2` is api, key."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1].isdecimal():
        words.pop()
    return words


@lru_cache(maxsize=4096)
def is_secret_setting(name: str) -> bool:
    """Return whether a setting, option, header or field of this name holds a secret: `api_key`, `--db-pass`.

    `key` and `token` count only with a qualifier (`api_key`, `auth_token`), because `sort_key` and `eos_token` are not
    secrets. For a name in capitals, which is that of an environment variable, `is_secret_variable` decides.
    """
    if name.isupper() and len(name) > 1:
        return is_secret_variable(name)
    words = _words(name)
    if not words or _DESCRIPTION.fullmatch(words[-1]) or _NAME_OF_SECRET.fullmatch(words[-1]):
        return False
    return _SECRET_SETTING.search("_".join(words)) is not None


@lru_cache(maxsize=4096)
def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret: `HF_TOKEN`, `PGPASSWORD`, `SENTRY_DSN`."""
    words = _words(name)
    if not words or _DESCRIPTION.fullmatch(words[-1]) or name in _HARMLESS_VARIABLES:
        return False
    return _SECRET_SETTING.search("_".join(words)) is not None or any(_is_secret_word(word, words) for word in words)


def _is_secret_word(word: str, words: list[str]) -> bool:
    if _VARIABLE_WORD.fullmatch(word):
        return "session" not in word or not any(map(_DESKTOP.fullmatch, words))
    if word.endswith(_ENDINGS) and not _HARMLESS_WORD.fullmatch(word):
        return "token" not in word or not any(map(_QUANTITY.fullmatch, words))
    return word.startswith("auth") and (not word.startswith("author") or word.startswith("authoriz"))


@lru_cache(maxsize=4096)
def is_secret_parameter(name: str) -> bool:
    """Return whether a parameter of a URL's query holds a secret: `api_key`, `sig`, `X-Amz-Signature`."""
    words = _words(name)
    return bool(words) and (is_secret_setting(name) or _PARAMETER.fullmatch("_".join(words)) is not None)
