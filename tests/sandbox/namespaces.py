"""Whether this system has user namespaces, which the sandbox with its own file system needs."""

from __future__ import annotations

import shutil
import subprocess

import pytest

# The namespaces of the sandbox. Some containers allow them, but not a new /proc.
_COMMAND = ["unshare", "--user", "--map-root-user", "-minpf", "--mount-proc", "true"]

needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(_COMMAND, check=False, capture_output=True).returncode != 0,
    reason="this system has no user namespaces",
)
