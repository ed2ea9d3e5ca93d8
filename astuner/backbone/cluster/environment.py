"""What the processes of a Ray that astuner starts are to find in their environment."""

from __future__ import annotations

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
