"""Signed API keys. A key names an episode and an agent, and expires."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import astuple, dataclass

_PREFIX = "sk-astuner-"
_MAC_BYTES = 32
_MAX_KEY_CHARS = 16384


@dataclass(frozen=True, slots=True)
class KeyClaims:
    """The contents of a key.

    Attributes:
        session: the number of the episode's session in this process.
        agent_name, target_tag: as in `ModelTuner.for_agent`.
        debug_model: the number of the endpoint's debug model in its session; None if it has none.
        expires: the time at which the key expires, on the clock `time.monotonic`.
        issues_keys: whether the gateway issues keys for other agents of the episode to its holder, which is a
            `ModelTuner` in another process.
    """

    session: int
    agent_name: str
    target_tag: str
    debug_model: int | None
    expires: float
    issues_keys: bool = False


class KeySigner:
    """Signs and checks keys with HMAC-SHA256 and a secret that exists only in this process and its forks."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, claims: KeyClaims) -> str:
        """Return the key with these claims."""
        payload = json.dumps(astuple(claims)).encode()
        return _PREFIX + base64.urlsafe_b64encode(self._mac(payload) + payload).rstrip(b"=").decode()

    def verify(self, key: str) -> KeyClaims | None:
        """Return the claims of a key; None if this process did not sign it, or it has expired."""
        if not key.startswith(_PREFIX) or len(key) > _MAX_KEY_CHARS or not key.isascii():
            return None
        text = key[len(_PREFIX) :]
        try:
            signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except binascii.Error:
            return None
        mac, payload = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        claims = KeyClaims(*json.loads(payload))
        return claims if claims.expires >= time.monotonic() else None

    def _mac(self, payload: bytes) -> bytes:
        return hmac.new(self._secret, payload, hashlib.sha256).digest()
