"""The API keys of the judge's LLM: rotation after rate limits, and backup keys."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from astuner.config.services import JudgeLlmConfig
from astuner.errors import ConfigError, JudgeUnavailableError
from astuner.system.redaction.redactor import learn_secret_settings

_DASHSCOPE, _OPENAI = "DASHSCOPE_API_KEY", "OPENAI_API_KEY"
_BACKUP_SUFFIX = "_BACKUP"
_ENDPOINTS = {
    _DASHSCOPE: "https://dashscope.aliyuncs.com/compatible-mode/v1",
    _OPENAI: "https://api.openai.com/v1",
}
_NO_KEY = "none"
"""Sent to a server of the user's own, which needs no key; the client requires one."""


@dataclass
class _Key:
    value: str
    is_backup: bool
    ready_at: float = 0.0
    is_rejected: bool = False


@dataclass
class ApiKeys:
    """The keys of an endpoint. A rate-limited key is paused; a rejected one is not used again.

    Backup keys are used while all other keys are paused or rejected.

    Attributes:
        variable: the environment variable of the keys; "" without keys.
    """

    base_url: str
    variable: str
    _keys: list[_Key] = field(repr=False)
    _next: int = field(default=0, repr=False)

    @staticmethod
    def from_environment(config: JudgeLlmConfig) -> ApiKeys:
        """Read the keys that the configuration names. They are redacted in everything that the run writes.

        Raises:
            ConfigError: no key is set, and no endpoint that might need none.
        """
        env = os.environ
        variable = config.api_key_env or next((name for name in (_DASHSCOPE, _OPENAI) if env.get(name)), "")
        primary, backup = _split(env.get(variable, "")), _split(env.get(variable + _BACKUP_SUFFIX, ""))
        base_url = config.base_url or (env.get("OPENAI_BASE_URL") if variable in ("", _OPENAI) else None)
        if config.api_key_env and not primary:
            raise ConfigError(
                f"task_judge.llm.api_key_env names the environment variable {config.api_key_env}, which is not set; "
                "export it, or remove api_key_env if the server needs no key"
            )
        if not variable and base_url is None:
            raise ConfigError(
                "the judge asks an LLM, and there is no key for one: export DASHSCOPE_API_KEY or OPENAI_API_KEY, or "
                "set task_judge.llm.base_url to an OpenAI-compatible server that needs no key"
            )
        base_url = base_url or _ENDPOINTS.get(variable, _ENDPOINTS[_OPENAI])
        for value in (*primary, *backup):
            learn_secret_settings({"api_key": value})
        keys = [_Key(value, False) for value in primary] + [_Key(value, True) for value in backup]
        return ApiKeys(base_url, variable, keys or [_Key(_NO_KEY, False)])

    def choose(self) -> str:
        """Return the next key that can be used, or the one that can be used first.

        Raises:
            JudgeUnavailableError: the endpoint has rejected all keys.
        """
        valid = [key for key in self._keys if not key.is_rejected]
        if not valid:
            number = len(self._keys)
            all_keys = f"all {number} keys in {self.variable} and its backup"
            rejected = f"the key in {self.variable}" if number == 1 else all_keys
            raise JudgeUnavailableError(
                f"{self.base_url} rejected {rejected if self.variable else 'a request without a key'}; export valid "
                "keys, and start the run again to resume it"
            )
        now = time.monotonic()
        ready = [key for key in valid if key.ready_at <= now and not key.is_backup]
        ready = ready or [key for key in valid if key.ready_at <= now]
        if not ready:
            return min(valid, key=lambda key: key.ready_at).value
        self._next += 1
        return ready[self._next % len(ready)].value

    def seconds_until_ready(self) -> float:
        """Return the seconds until a key can be used; 0 if one can be used now."""
        times = [key.ready_at for key in self._keys if not key.is_rejected]
        return max(min(times, default=0.0) - time.monotonic(), 0.0)

    def rest(self, value: str, seconds: float) -> None:
        """Do not use a rate-limited key for some seconds, unless all keys are limited."""
        for key in self._keys:
            if key.value == value:
                key.ready_at = time.monotonic() + seconds

    def reject(self, value: str) -> None:
        """Never use a key again, because the endpoint has rejected it."""
        for key in self._keys:
            if key.value == value:
                key.is_rejected = True


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split("|") if part.strip()]
