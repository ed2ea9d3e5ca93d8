"""What the processes of a Ray that astuner starts are to find in their environment."""

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
}

ON_LOOPBACK = {
    # Read when ray is imported: without it, Ray takes the network's address for 127.0.0.1 and listens on all.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

LEAST_CPUS = 64
"""Ray reserves CPUs and does not measure them: processes that want more than there are would wait for ever."""


@contextlib.contextmanager
def environment_set(wanted: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Set variables for the block, but for those that the user has set; give all of `wanted` as they are then."""
    added = wanted.keys() - os.environ.keys()
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield {name: os.environ[name] for name in wanted}
    finally:
        for name in added:
            os.environ.pop(name, None)
