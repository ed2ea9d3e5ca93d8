"""What Ray's workers do when they start, where vLLM samples (`worker_process_setup_hook`)."""

from __future__ import annotations

import os

import ray


def name_the_ray() -> None:
    """Let processes that this one starts find its Ray: vLLM's engine takes new weights from it, in one of its own.

    Without an address it would start a Ray for itself.
    """
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
