"""Names of secrets, and secrets that are recognised by their format: known keys, credentials in URLs and headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import unquote

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
_PARAMETER_NAME = re.compile(r"keys?|tokens?|auth|pwd|(?:[a-z_]+_)?(?:sig|sign|signature)")


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
    return bool(words) and (is_secret_setting(name) or _PARAMETER_NAME.fullmatch("_".join(words)) is not None)


Span = tuple[int, int]

# The formats are those that the services document. The first item is a literal that every match contains: searching for
# the literal first is fast on long texts. A match of group `other` is not a secret. It ends the search in a text that
# lacks a part of the format. Without it, the search for that part would start at many places and take quadratic time.
_FORMATS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (literal, re.compile(pattern))
    for literal, pattern in (
        (  # OpenAI and many others; csk-: Cerebras
            "sk-",
            r"\b[a-z]?sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}|(?P<other>\b[a-z]?sk-[A-Za-z_-]*)",
        ),
        ("k_", r"\b[prs]k_(?:live|test)_[A-Za-z0-9]{10,}"),  # Stripe
        ("whsec_", r"\bwhsec_[A-Za-z0-9+/=]{16,}"),
        ("gsk_", r"\bgsk_[A-Za-z0-9]{16,}"),  # Groq
        ("xai-", r"\bxai-[A-Za-z0-9]{16,}"),
        ("r8_", r"\br8_[A-Za-z0-9]{16,}"),  # Replicate
        ("tgp_v1_", r"\btgp_v1_[\w-]{16,}"),  # Together
        ("fw_", r"\bfw_[A-Za-z0-9]{20,}"),  # Fireworks
        ("pplx-", r"\bpplx-[A-Za-z0-9]{16,}"),
        ("tvly-", r"\btvly-[A-Za-z0-9-]{16,}"),
        ("nvapi-", r"\bnvapi-[\w-]{16,}"),
        ("hf_", r"\bhf_[A-Za-z0-9]{16,}"),
        ("api_org_", r"\bapi_org_[A-Za-z0-9]{16,}"),  # Hugging Face organisations
        *((f"gh{kind}_", rf"\bgh{kind}_[A-Za-z0-9]{{16,}}") for kind in "oprsu"),
        ("github_pat_", r"\bgithub_pat_\w{20,}"),
        ("gl", r"\bgl(?:pat|dt|rt|rtr|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[\w.-]{16,}"),  # GitLab
        ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
        ("xapp-", r"\bxapp-[A-Za-z0-9-]{16,}"),
        *((kind, rf"\b{kind}[0-9A-Z]{{16}}\b") for kind in ("AKIA", "ASIA", "ABIA", "ACCA")),  # AWS
        ("AIza", r"\bAIza[\w-]{30,}"),
        ("ya29.", r"\bya29\.[\w.-]{16,}"),
        ("1//0", r"\b1//0[\w-]{20,}"),  # Google's refresh tokens
        ("GOCSPX-", r"\bGOCSPX-[\w-]{16,}"),
        ("SG.", r"\bSG\.[\w-]{16,}\.[\w-]{16,}"),  # SendGrid
        ("key-", r"\bkey-[0-9a-f]{32}\b"),  # Mailgun
        ("npm_", r"\bnpm_[A-Za-z0-9]{30,}"),
        ("pypi-", r"\bpypi-[\w-]{30,}"),
        ("dckr_", r"\bdckr_[po]at_[\w-]{16,}"),
        ("do", r"\bdo[opr]_v1_[0-9a-f]{40,}"),  # DigitalOcean
        ("shp", r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{30,}"),
        ("hv", r"\bhv[sbr]\.[\w-]{20,}"),  # HashiCorp Vault
        ("ntn_", r"\bntn_[A-Za-z0-9]{30,}"),
        ("lin_", r"\blin_(?:api|oauth)_[A-Za-z0-9]{30,}"),
        ("sntry", r"\bsntry[su]_[\w+/=-]{20,}"),
        ("PMAK-", r"\bPMAK-[0-9a-f-]{30,}"),
        ("dapi", r"\bdapi[0-9a-f]{32}"),  # Databricks
        (":AA", r"\b[0-9]{8,10}:AA[\w-]{33}"),  # Telegram
        ("AGE-SECRET-KEY-", r"\bAGE-SECRET-KEY-1[0-9A-Z]{20,}"),
        ("eyJ", r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|(?P<other>\beyJ[\w-]*)"),  # JSON Web Tokens
        (
            "PRIVATE KEY",
            r"(?s)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,40}-----.*?"
            r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,40}-----|\Z)",
        ),
        ("earer", r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{20,}"),
        ("://", r"(?<=://)[^/\s:@?#\"'<>]*:[^/\s@\"'<>]+(?=@)"),  # user:password
        ("://", r"(?i)(?<=https://)(?!git@)[^/\s:@?#\"'<>]+(?=@)|(?<=http://)(?!git@)[^/\s:@?#\"'<>]+(?=@)"),
        ("hooks.slack.com", r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/-]+"),
        ("/api/webhooks/", r"(?<=/api/webhooks/)[0-9]+/[\w-]+"),  # Discord
        ("webhook.office.com", r"(?<=webhook\.office\.com/)[\w@/.-]+"),
        ("hooks.zapier.com", r"(?<=hooks\.zapier\.com/hooks/)[\w/-]+"),
        ("/bot/v2/hook/", r"(?<=/bot/v2/hook/)[\w-]+"),  # Feishu and Lark
    )
)

_PARAMETER = re.compile(r"(?:[?&]|&amp;)([\w.~%+-]{1,60})=([^&\s\"'<>#(){}\[\]|\\^`]+)")
_AUTHORIZATION = re.compile(
    r"(?i)authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
    r"(?:(?:basic|bearer|token|digest|apikey|negotiate)\s{1,3})?([A-Za-z0-9._~+/=:-]{6,})"
)
_COOKIE = re.compile(r"(?i)\bcookie[\"']?\s{0,3}:\s{0,3}[\"']?([^\s=;\"']{1,256}=[^\r\n\"']+)")
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_-])([A-Za-z_-][A-Za-z0-9_-]{1,59}+)"
    r"\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?([^\s\\\"',;&<>(){}\[\]|]{8,})"
)
_OPTION = re.compile(r"(?<![\w-])--?([A-Za-z][\w-]{1,60})(=|\s{1,3})[\"']?([^\s\"',;]+)")
_CONNECTION_STRING = re.compile(
    r"(?i)(?:^|[;\s\"'])(?:AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)=([^;\s\"']+)"
)


def secret_spans(text: str) -> Iterator[Span]:
    """Yield the start and end of every secret that is recognised by its format. The spans may overlap."""
    for literal, pattern in _FORMATS:
        if literal in text:
            yield from (match.span() for match in pattern.finditer(text) if match.lastgroup != "other")
    if "=" not in text and ":" not in text and " -" not in text and not text.startswith("-"):
        return
    if "?" in text or "&" in text:
        for match in _PARAMETER.finditer(text):
            name = unquote(match[1])
            if is_secret_parameter(name) or (name == "code" and len(match[2]) >= 20):
                yield match.span(2)
    lower = text.lower()
    if "authorization" in lower:
        yield from (match.span(1) for match in _AUTHORIZATION.finditer(text) if looks_like_credential(match[1]))
    if "cookie" in lower:
        yield from (match.span(1) for match in _COOKIE.finditer(text))
    if ";" in text:
        yield from (match.span(1) for match in _CONNECTION_STRING.finditer(text))
    yield from _assigned(text)


def _assigned(text: str) -> Iterator[Span]:
    """Yield the values in `api_key="…"`, `"password": "…"` and `--token …`.

    Apart from `--token=…`, the value must look like a credential, because agents write and discuss programs:
    `api_key=os.environ[…]`, `password: required`.
    """
    for match in _NAMED.finditer(text):
        if is_secret_setting(match[1]) and looks_like_credential(match[2], needs_digit=True):
            yield match.span(2)
    if " -" in text or text.startswith("-"):
        for match in _OPTION.finditer(text):
            is_value = match[2] == "=" or looks_like_credential(match[3], needs_digit=True)
            if is_value and is_secret_setting(match[1]):
                yield match.span(3)


def holds_credential(name: str, value: str) -> bool:
    """Return whether a data field has a secret's name and a value that looks like one."""
    return is_secret_setting(name) and looks_like_credential(value, needs_digit=True)


def looks_like_credential(text: str, *, needs_digit: bool = False) -> bool:
    """Return whether a text of at least 8 characters mixes letters and digits, or (unless `needs_digit`) case."""
    if len(text) < 8 or any(character.isspace() for character in text):
        return False
    letters = any(character.isalpha() for character in text)
    digits = any(character.isdecimal() for character in text)
    return (letters and digits) or (not needs_digit and text != text.lower() and text[1:] != text[1:].lower())
