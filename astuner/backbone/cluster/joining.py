"""Finding a Ray that is there, before Ray itself looks: it waits for minutes where none answers, and says little."""

from __future__ import annotations

import socket
import subprocess
import sys

from astuner.errors import BackboneError

_SECONDS_TO_CONNECT = 10.0
# In a process of its own: where the other side is no Ray, this never returns.
_ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_MEND = "start one there with `ray start --head`, or leave the key out to have one started for the run"


def found_ray(address: str, patience: float = 60.0) -> str:
    """Return the `host:port` of a Ray that answers.

    Args:
        address: `trainer_common.ray_address`, `host:port` or `auto`.
        patience: seconds within which it has to answer.

    Raises:
        BackboneError: there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = str(canonicalize_bootstrap_address(address))
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, ValueError) as error:  # none found; nothing listens, or no such host; no such port
        raise BackboneError(f"{not_joined(address)}: {error}; {_MEND}") from error
    try:
        ended = subprocess.run([sys.executable, "-c", _ASK, found], capture_output=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        ended = None
    if ended is None or ended.returncode != 0:
        raise BackboneError(
            f"{not_joined(address)}: what listens at {found} does not answer as Ray {_version()} does; {_MEND}"
        )
    return found


def not_joined(address: str) -> str:
    """Return how a message begins on a Ray that cannot be joined."""
    return f"the Ray at {address} (trainer_common.ray_address) could not be joined"


def _version() -> str:
    import ray

    return str(ray.__version__)
