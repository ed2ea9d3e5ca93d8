"""Finding a Ray that is there, before Ray itself looks: it waits for minutes where none answers, and says little."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

from astuner.backbone.cluster.environment import TOKEN_MODE
from astuner.errors import BackboneError

_WANTS_TOKEN = "AuthenticationError"
_SECONDS_TO_CONNECT = 10.0
# In a process of its own: where the other side is no Ray, this never returns.
_ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_MEND = "trainer_common.ray_address has to be that of a Ray (`ray start --head`); without it, one is started"


def found_ray(address: str, patience: float = 60.0) -> str:
    """Return the `host:port` of a Ray that answers.

    Args:
        address: `trainer_common.ray_address`, `host:port` or `auto`.
        patience: seconds within which it has to answer.

    Raises:
        BackboneError: there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address

    found: str | None = None
    try:
        found = str(canonicalize_bootstrap_address(address))
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, ValueError) as error:  # none found; nothing listens, or no such host; no such port
        where = "" if found in (None, address) else f" (it was looked for at {found})"
        raise BackboneError(f"{not_joined(address)}{where}: {error}; {_MEND}") from error
    silent = _why_silent(found, patience)
    if silent is not None and _WANTS_TOKEN in silent and _shows_token():
        silent = _why_silent(found, patience)
    if silent is None:
        return found
    if _WANTS_TOKEN in silent:
        raise BackboneError(
            f"{not_joined(address)}: it asks for the token that it was started with; set RAY_AUTH_TOKEN to it, or "
            "have it in ~/.ray/auth_token"
        )
    raise BackboneError(
        f"{not_joined(address)}: what listens at {found} does not answer as Ray {_version()} does; {_MEND}"
    )


def refuse_missing_ray(address: str | None) -> None:
    """Make sure that a Ray answers where one is to be joined.

    Args:
        address: `trainer_common.ray_address`; None where none is.

    Raises:
        BackboneError: none does.
    """
    if address is not None:
        found_ray(address)


def _why_silent(found: str, patience: float) -> str | None:
    """Return None where a Ray answers, else what was said in its place."""
    command = [sys.executable, "-c", _ASK, found]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {patience:g} s"
    return None if ended.returncode == 0 else ended.stderr


def _shows_token() -> bool:
    """Have this process show the user's token from now on, if there is one.

    Ray does so by itself for `auto` only, while `ray start` asks for a token wherever the user has one.
    """
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger("ray").setLevel(logging.ERROR)  # as the run's own; it would say how to do without
    chosen = TOKEN_MODE in os.environ
    return not chosen and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def not_joined(address: str) -> str:
    """Return how a message begins on a Ray that cannot be joined."""
    return f"the Ray at {address} could not be joined"


def _version() -> str:
    import ray

    return str(ray.__version__)
