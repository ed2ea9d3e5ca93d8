"""Looking into an environment, with its own interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from astuner.errors import InstallError
from astuner.launcher.environments.versions import plain_name, unmet

_PROBE = Path(__file__).parent / "probe.py"
_SECONDS = 600.0
_STEERING = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PIP_REQUIREMENT", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV", "PIP_NO_DEPS", "PIP_DRY_RUN", "PIP_PYTHON", "PIP_REPORT",
    "UV_CONSTRAINT", "UV_BUILD_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT",
    "UV_SYSTEM_PYTHON", "UV_REQUIRE_HASHES",
)  # fmt: skip


def environment_of_its_own() -> dict[str, str]:
    """Return this process's variables without those that steer Python, pip or uv towards another environment.

    Those that say where packages come from (index, proxies, certificates) stay.
    """
    return {name: value for name, value in os.environ.items() if name not in _STEERING}


@dataclass(frozen=True)
class Inspection:
    """What was found in an environment.

    Attributes:
        python: its version.
        prefix: its folder.
        installed: version by plain name.
        requires: what each package declares, by plain name.
        cuda: the version of CUDA that PyTorch was built for; None for a CPU build, or none.
        failed: error by module that does not import.
    """

    python: str
    prefix: str
    installed: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    cuda: str | None
    failed: dict[str, str]

    def contradictions(self, disregard: Iterable[str] = ()) -> list[str]:
        """Return what packages declare to need and do not find.

        Args:
            disregard: packages whose absence, or version, is known and meant.
        """
        known = {plain_name(name) for name in disregard}
        minor = ".".join(self.python.split(".")[:2])
        python = {"python_version": minor, "python_full_version": self.python}
        return [
            f"{name} {self.installed[name]} needs {lack}"
            for name, requirements in sorted(self.requires.items())
            for lack in unmet(requirements, self.installed, python)
            if lack.name not in known
        ]


def inspect(python: Path, imports: Iterable[str] = (), *, isolated: bool = True) -> Inspection:
    """Ask an interpreter what is installed beside it.

    Args:
        python: the interpreter.
        imports: modules to import there; `name?` is passed over where it is not installed.
        isolated: without this process's PYTHONPATH, as it will be for whoever has none.

    Raises:
        InstallError: the interpreter does not run, or dies.
    """
    variables = environment_of_its_own() if isolated else dict(os.environ)
    command = [str(python), "-P", *(["-s"] if isolated else []), str(_PROBE), *imports]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False)
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{python} does not run: {error}") from error
    except ValueError as error:
        raise InstallError(
            f"{python} died with exit code {done.returncode} as it imported {', '.join(imports) or 'nothing'}"
        ) from error
    return Inspection(
        python=found["python"],
        prefix=found["prefix"],
        installed={plain_name(name): version for name, version in found["installed"].items()},
        requires={plain_name(name): tuple(lines) for name, lines in found["requires"].items()},
        cuda=found["cuda"],
        failed=found["failed"],
    )


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver is at work here and has a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return listed.returncode == 0 and "GPU" in listed.stdout
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())
