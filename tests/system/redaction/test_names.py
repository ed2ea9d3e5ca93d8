"""Which names indicate a secret."""

from __future__ import annotations

import pytest

from astuner.config.keys import schema
from astuner.system.redaction.formats import is_secret_setting, is_secret_variable


@pytest.mark.parametrize(
    "name",
    [
        "MYSQL_PWD",
        "PGPASS",
        "PGPASSWORD",
        "SMTP_PASS",
        "DB_PASS",
        "DB_PASSWD",
        "SENTRY_DSN",
        "POSTGRES_DSN",
        "AZURE_STORAGE_CONNECTION_STRING",
        "DB_CONN_STR",
        "MY_CONNECTIONSTRING",
        "JWT",
        "APP_JWT",
        "GH_PAT",
        "AZURE_DEVOPS_EXT_PAT",
        "GPG_PASSPHRASE",
        "GOOGLE_CREDS",
        "DB_CRED",
        "aws_credentials",
        "BEARER",
        "X_BEARER",
        "SESSION_COOKIE",
        "FLASK_SESSION",
        "SSH_PRIVATE_KEY",
        "HTTP_AUTHORIZATION",
        "BASIC_AUTH",
        "SLACK_SIGNING_SECRET",
        "WEBHOOK_SIGNING",
        "BLOB_SAS",
        "SAS_TOKEN",
        "SLACK_WEBHOOK_URL",
        "DISCORD_WEBHOOK",
        "OPENAI_API_KEY",
        "OPENAI_API_KEY_2",
        "API_KEY_PROD",
        "openaiApiKey",
        "GITHUBTOKEN",
        "NPM_TOKENS",
        "DASHSCOPE_APIKEY",
        "SSHPASS",
        "CSRF_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "HMAC_KEY",
        "OAUTH2_CLIENT_SECRET",
    ],
)
def test_secret_variables(name: str) -> None:
    assert is_secret_variable(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PWD",
        "OLDPWD",
        "HOME",
        "TOKENIZERS_PARALLELISM",
        "TOKENIZER",
        "MAX_TOKENS",
        "MAX_NEW_TOKENS",
        "TOKEN_IDS",
        "PASS_N",
        "VAL_PASS_N",
        "PASS_AT_1",
        "BYPASS_PROXY",
        "COMPASS_DIR",
        "GIT_AUTHOR_NAME",
        "AUTHOR",
        "AUTHORITY_NAME",
        "KEYBOARD",
        "XKB_KEYMAP",
        "MONKEY_PATCH",
        "SSH_AUTH_SOCK",
        "SSH_ASKPASS",
        "API_KEY_ENV",
        "TOKEN_LIMIT",
        "XDG_SESSION_ID",
        "DBUS_SESSION_BUS_ADDRESS",
        "DESKTOP_SESSION",
        "COMPAT",
        "FORMAT",
        "SASL_MECHANISM",
        "CREDITS",
        "PYTHONPATH",
        "LANG",
    ],
)
def test_harmless_variables(name: str) -> None:
    assert not is_secret_variable(name)


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "openaiApiKey",
        "X-Api-Key",
        "hf_token",
        "access_token",
        "token",
        "password",
        "passwd",
        "db_pass",
        "mysql_pwd",
        "passphrase",
        "client_secret",
        "secret",
        "credentials",
        "Authorization",
        "Cookie",
        "jwt",
        "sentry_dsn",
        "connection_string",
        "gh_pat",
        "sas",
        "webhook_url",
        "private_key",
        "SMTP_PASS",
        "GROQ_KEY",
    ],
)
def test_secret_settings(name: str) -> None:
    assert is_secret_setting(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "pass_n",
        "val_pass_n",
        "token_ids",
        "bypass",
        "path",
        "author",
        "keyboard",
        "sort_key",
        "reward_fn_key",
        "prompt_key",
        "eos_token",
        "pad_token",
        "api_key_env",
        "api_key_name",
        "n_pass",
        "forward_pass",
        "compat",
        "session",
        "token_mean",
        "keys",
    ],
)
def test_harmless_settings(name: str) -> None:
    assert not is_secret_setting(name)


def test_no_key_of_the_configuration_holds_a_secret() -> None:
    assert [path for path in schema().declarations if is_secret_setting(path[-1])] == []
