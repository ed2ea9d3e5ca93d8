from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.system.redaction.redactor import Redactor, redact, redact_argv, secrets_in
from tests.examples import examples

VISIBLE = st.characters(max_codepoint=0x2FF, exclude_categories=("Z", "C"), exclude_characters="[]")
# hypothesis also draws the texts of the code. An existing path among them is not a secret.
SECRETS = st.text(VISIBLE, min_size=8, max_size=40).filter(lambda text: not os.path.exists(text))


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY",
        "HF_TOKEN",
        "MY_SECRET",
        "PGPASSWORD",
        "aws_credentials",
        "HTTP_AUTHORIZATION",
        "SESSION_COOKIE",
    ],
)
def test_value_of_a_variable_with_the_name_of_a_secret_is_redacted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "Zr9-plain/looking=value")
    assert redact("a Zr9-plain/looking=value b") == "a [redacted] b"


def test_each_of_several_keys_in_one_variable_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", "sk-aaaaa1|sk-bbbbb2")
    assert redact("with sk-bbbbb2, then sk-aaaaa1") == "with [redacted], then [redacted]"
    assert "bbbbb2" not in redact("DASHSCOPE_API_KEY=sk-aaaaa1|sk-bbbbb2")


def test_short_keys_in_a_known_format_are_redacted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", "sk-aaaa|sk-bbbb")
    assert redact("one sk-aaaa, two sk-bbbb") == "one [redacted], two [redacted]"


def test_value_in_a_key_format_is_redacted_for_any_variable_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SERVICE", "sk-short77")
    monkeypatch.setenv("DATABASE_URL", "postgres://joe:dbpass9word@host/db")
    assert redact("sk-short77 and dbpass9word") == "[redacted] and [redacted]"


@pytest.mark.parametrize(
    "key",
    [
        "sk-proj-abcdEFGH1234abcdEFGH",
        "hf_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrst0123456789",
        "github_pat_11ABCDEFG0abcdefghijk_xyz",
        "glpat-abcdefghij1234567890",
        "xoxb-1234567890-abcdef",
        "AKIAABCDEFGHIJKLMNOP",
        "AIzaSyA1234567890abcdefghijklmnopqrstu",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-DEF",
        "gsk_abcdefghijklmnop1234567890ABCDEF",
        "xai-abcdefghijklmnop1234567890",
        "r8_abcdefghijklmnop1234567890",
        "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG",
        "ya29.a0AfH6SMBxyz-abc_1234567890",
        "ASIAABCDEFGHIJKLMNOP",
        "nvapi-abcdefghijklmnop-1234567890",
        "sk_" + "live_abcdefghij1234567890",
        "GOCSPX-abcdefghijklmnopqrst",
        "hvs.abcdefghijklmnopqrstuvwx",
        "dckr_pat_abcdefghijklmnopqrst",
        "npm_abcdefghijklmnopqrstuvwxyz0123456789",
        "123456789:AAabcdefghijklmnopqrstuvwxyz0123456",
    ],
)
def test_known_formats_are_redacted_without_a_variable(key: str) -> None:
    assert redact(f'{{"k": "{key}"}}') == '{"k": "[redacted]"}'


def test_credentials_in_headers_urls_and_key_files_are_redacted() -> None:
    assert redact("Authorization: Bearer abcdefghij.klmnopqrst-uv") == "Authorization: Bearer [redacted]"
    assert redact("https://joe:pa55@host/x?y") == "https://[redacted]@host/x?y"
    pem = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"
    assert redact(f"key: {pem}.") == "key: [redacted]."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/v1?api_key=abc&x=1&token=t2&sig=a%2Fb#f", "https://h/v1?api_key=#&x=1&token=#&sig=##f"),
        ("GET /v1?X-Amz-Signature=0ab&X-Amz-Date=1", "GET /v1?X-Amz-Signature=#&X-Amz-Date=1"),
        ("http://TOKEN1@host/x and git+https://x9@host", "http://#@host/x and git+https://#@host"),
        ("redis://:pa55@host:1/0", "redis://#@host:1/0"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic #"),
        ('{"Authorization": "Bearer Abcdefgh1"}', '{"Authorization": "Bearer #"}'),
        ("authorization: abcdefg1234", "authorization: #"),
        ("Cookie: sid=abc; theme=dark\nnext", "Cookie: #\nnext"),
        ("run --api-key=hunter2 x", "run --api-key=# x"),
        ("run --api-key hunter2x9 x", "run --api-key # x"),
        ('{"api_key": "abcdefg1"}', '{"api_key": "#"}'),
        (r"{\"db_password\": \"abcdefg1\"}", r"{\"db_password\": \"#\"}"),
        ("OpenAI(api_key='abcdefg1')", "OpenAI(api_key='#')"),
        ("PGPASS=abcdefg1 psql", "PGPASS=# psql"),
        ("x;AccountKey=abc/def==;EndpointSuffix=y", "x;AccountKey=#;EndpointSuffix=y"),
        ("https://hooks.slack.com/services/T0/B0/xyz ok", "https://hooks.slack.com/# ok"),
        ("https://discord.com/api/webhooks/123/a-b_c ok", "https://discord.com/api/webhooks/# ok"),
    ],
)
def test_credentials_are_recognised_by_their_place(text: str, shown: str) -> None:
    assert redact(text) == shown.replace("#f", "HASH").replace("#", "[redacted]").replace("HASH", "#f")


@pytest.mark.parametrize(
    "text",
    [
        "client = OpenAI(api_key=os.environ['OPENAI_API_KEY'])",
        "password: required",
        "pass --api-key to the command",
        "the token= sign, key: value, sort(key=lambda x1: x1)",
        "tokens_raw: 123456789, max_tokens=16384000, pass_n: 4, author=Ada2Lovelace",
        "https://host/path?page=2&sort_by=name&max_tokens=5",
        "https://example.com/user@example.com",
        "git@github.com:a/b and ssh://git@github.com/a/b",
        "Authorization: required",
        "Basic authentication",
        "risk-averse people",
        "a task-oriented agent",
        "sk-learn-is-a-library-without-digits",
        "https://host:80/a@b",
        "hf_hub",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redact(text) == text


def test_short_values_authors_tokenizers_and_existing_paths_are_not_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "dev")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Ada Lovelace")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "very-false")
    monkeypatch.setenv("KEY_FOLDER", __file__)
    text = f"dev Ada Lovelace very-false {__file__}"
    assert redact(text) == text


def test_a_change_of_the_environment_is_noticed_and_earlier_secrets_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert redact("later-set-value") == "later-set-value"
    monkeypatch.setenv("LATE_TOKEN", "later-set-value")
    assert redact("later-set-value") == "[redacted]"
    monkeypatch.delenv("LATE_TOKEN")
    assert redact("later-set-value") == "[redacted]"


def test_a_secret_that_contains_another_is_removed_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_KEY", "abcdefgh")
    monkeypatch.setenv("SECOND_KEY", "abcdefghIJKL")
    assert redact("abcdefghIJKL") == "[redacted]"


@settings(max_examples=examples(200), deadline=None)
@given(
    secret=SECRETS,
    before=st.text(max_size=30),
    after=st.text(max_size=30),
)
def test_all_encodings_of_a_secret_are_redacted(secret: str, before: str, after: str) -> None:
    redactor = Redactor(tuple(secrets_in({"SERVICE_KEY": secret})))
    written_forms = (
        secret,
        json.dumps(secret)[1:-1],
        repr(secret)[1:-1],
        quote(secret, safe=""),
        quote_plus(secret),
        secret.encode().hex(),
    )
    for written in written_forms:
        assert written not in redactor(before + written + after)


@given(secret=SECRETS, before=st.binary(max_size=7), after=st.binary(max_size=7))
def test_a_secret_in_base64_is_redacted_wherever_it_is(secret: str, before: bytes, after: bytes) -> None:
    redactor = Redactor(tuple(secrets_in({"SERVICE_KEY": secret})))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        shown = redactor(f"auth = {encode(before + secret.encode() + after).decode()}")
        assert "[redacted]" in shown
        rest = shown.removeprefix("auth = ").partition("[redacted]")
        assert len(rest[0]) + len(rest[2]) <= len(base64.b64encode(before + after)) + 4


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["run", "--api-key", "hunter2"], ["run", "--api-key", "[redacted]"]),
        (["run", "--api-key=hunter2"], ["run", "--api-key=[redacted]"]),
        (["run", "astuner.judge.api_key=hunter2"], ["run", "astuner.judge.api_key=[redacted]"]),
        (["run", "x.max_tokens=512", "--conf", "a.yaml"], ["run", "x.max_tokens=512", "--conf", "a.yaml"]),
        (["run", "url=https://u:p4ss@h/"], ["run", "url=https://[redacted]@h/"]),
    ],
)
def test_secrets_of_the_command_line_are_redacted(argv: list[str], shown: list[str]) -> None:
    assert redact_argv(argv) == shown


# A million characters take seconds in linear time, and hours in quadratic time.
REDACT_LONG_TEXTS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
from astuner.system.redaction.redactor import redact
texts = (beginning + piece * (1_000_000 // len(piece)) for beginning, piece in {pieces})
for text in texts:
    print(repr(text[:40]), flush=True)
    assert redact(text) == text
print("all")
"""


def test_redaction_of_long_texts_takes_linear_time() -> None:
    pieces = [
        ("", "a light sketch of a long answer :// with gh and sk- in it. "),
        ("", "sk-"),
        ("", "csk-a-"),
        ("", "eyJ-"),
        ("", "eyJaaaaaaaaaaa-"),
        ("eyJaaaaaaaaaaa.", "eyJaaaaaaaaaaa-"),
        ("", "cookie:"),
        ("-----BEGIN ", "PRIVATE KEY "),
        ("", "-----BEGIN A"),
        ("", "authorization: basic "),
        ("", "https://a:"),
    ]
    keys = {f"SERVICE_{number}_KEY": f"sk-abcdefgh-{number:04}" for number in range(20)}
    command = [sys.executable, "-c", REDACT_LONG_TEXTS.format(pieces=pieces)]
    ended = subprocess.run(command, env=os.environ | keys, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "all"), ended.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sk-no-key-at-all, sk-abcdefgh12345678", "sk-no-key-at-all, #"),
        ("task-sk-words-only-here sk-a1 csk-abcdefgh12345678.", "task-sk-words-only-here sk-a1 #."),
        ("eyJ-eyJhbGciOiJI.eyJzdWIiOiIx.abc", "#"),
        ("eyJnothing eyJhbGciOiJIUzI1 eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc", "eyJnothing eyJhbGciOiJIUzI1 #"),
    ],
)
def test_text_that_begins_like_a_key_hides_no_key_behind_it(text: str, shown: str) -> None:
    assert redact(text) == shown.replace("#", "[redacted]")


def test_a_secret_within_a_key_of_a_known_format_is_removed_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_KEY", "qrstuvwx")
    assert redact("my hf_abcdefghijklmnopqrstuvwxyz, then") == "my [redacted], then"
    assert redact("qrstuvwx and qrstuvwx") == "[redacted] and [redacted]"
