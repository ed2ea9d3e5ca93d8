"""Whether this system has user namespaces, which the sandbox with its own file system needs."""

from __future__ import annotations

import shutil
import subprocess

import pytest

_COMMAND = ["unshare", "--user", "--map-root-user", "true"]

needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(_COMMAND, check=False, capture_output=True).returncode != 0,
    reason="this system has no user namespaces",
)
