"""Starts and ends the processes of astuner's own that this process needs: guards, filters and servers that fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from astuner.system.paths import python_path


def start_module(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`, which imports this process's astuner, even if it is not installed.

    Args:
        env: variables to add to the environment.
        options: of `subprocess.Popen`.
    """
    variables = {**os.environ, "PYTHONPATH": python_path(), **(env or {})}
    return subprocess.Popen((sys.executable, "-P", "-m", module, *arguments), env=variables, **options)


def wait_or_kill(process: subprocess.Popen[bytes] | psutil.Process, seconds: float) -> None:
    """Wait until a child process has ended, and kill it after some seconds."""
    try:
        process.wait(seconds)
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
        process.kill()
        process.wait()
