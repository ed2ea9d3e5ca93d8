"""Secrets that are recognised by their format: keys of known services, credentials in URLs and headers, assignments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

from astuner.system.redaction.names import is_secret_parameter, is_secret_setting

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
    """Return whether a text of at least 8 characters mixes letters and digits, or lower and upper case.

    Args:
        text: the text.
        needs_digit: whether mixed case without a digit does not suffice.
    """
    if len(text) < 8 or any(character.isspace() for character in text):
        return False
    letters = any(character.isalpha() for character in text)
    digits = any(character.isdecimal() for character in text)
    return (letters and digits) or (not needs_digit and text != text.lower() and text[1:] != text[1:].lower())
