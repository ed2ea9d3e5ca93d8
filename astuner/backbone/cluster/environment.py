"""What the processes of a Ray are to find in their environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would kill workers where the machine is nearly full of other things; the system does so when it is full.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's default leaves its workers what other processes do not want of a core: they are the run itself.
    "RAY_worker_niceness": "0",
    # Ray would start workers for the driver before it knows their environment, and then others with it.
    "RAY_prestart_worker_first_driver": "0",
}

ON_LOOPBACK = {
    # Read when ray is imported: without it, Ray takes the network's address for 127.0.0.1 and listens on all.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

OWN_ENVIRONMENT: Mapping[str, str] = OWN_RAY | ON_LOOPBACK
"""Of a Ray that is started for a run, on this machine alone, and of the process that uses it."""

TOKEN_MODE = "RAY_AUTH_MODE"
"""The variable that says whether Ray's processes show a token; Ray sets it, and leaves it, for a Ray that it starts."""

LEAST_CPUS = 64
"""Ray reserves CPUs and does not measure them: processes that want more than there are would wait for ever."""


@contextlib.contextmanager
def environment_set(wanted: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Set variables for the block, but for those that the user has set; give all of `wanted` as they are then."""
    added = wanted.keys() - os.environ.keys()
    passing = added if TOKEN_MODE in os.environ else added | {TOKEN_MODE}
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield {name: os.environ[name] for name in wanted}
    finally:
        for name in passing:
            os.environ.pop(name, None)
