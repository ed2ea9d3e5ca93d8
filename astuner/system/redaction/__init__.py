"""Redaction of secrets in everything that a run writes and prints."""

from astuner.system.redaction.formats import holds_credential, is_secret_setting, is_secret_variable
from astuner.system.redaction.redactor import (
    REDACTED,
    Redactor,
    StreamRedactor,
    current_redactor,
    learn_secret_settings,
    learn_secrets,
    redact,
    redact_argv,
    redact_settings,
    secret_variables,
    secrets_in,
)

__all__ = [
    "REDACTED",
    "Redactor",
    "StreamRedactor",
    "current_redactor",
    "holds_credential",
    "is_secret_setting",
    "is_secret_variable",
    "learn_secret_settings",
    "learn_secrets",
    "redact",
    "redact_argv",
    "redact_settings",
    "secret_variables",
    "secrets_in",
]
