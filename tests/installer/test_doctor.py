"""`astuner doctor`: problems are reported with the commands that fix them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from astuner.cli.main import main
from astuner.installer import doctor
from astuner.installer.doctor import EnvReport, examine
from astuner.installer.env_dir import EnvDir
from astuner.installer.env_specs import BACKBONES, ENV_SPECS, EnvSpec, env_spec_for
from astuner.installer.inspection import unmet
from astuner.installer.install import InstallRequest, install
from tests.installer.conftest import Index, small_spec, use_spec

RequestFor = Callable[..., InstallRequest]


def report(backbone: str) -> EnvReport:
    return next(report for report in examine() if report.backbone == backbone)


def problems(backbone: str) -> list[tuple[str, str, bool]]:
    return problems_in(report(backbone))


def problems_in(report: EnvReport) -> list[tuple[str, str, bool]]:
    return [(finding.problem, finding.fix, finding.broken) for finding in report.findings]


def packages() -> Path:
    (folder,) = EnvDir.of("verl").folder.glob("lib/python*/site-packages")
    return folder


def test_nothing_is_installed(spec: EnvSpec, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    reports = {report.backbone: report for report in examine()}
    assert reports["local"].state == "ready"
    assert reports["local"].versions["torch"].startswith("2.")
    assert reports["verl"].state == "not installed"
    monkeypatch.setattr(sys, "argv", ["astuner", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "verl     not installed" in out
    assert "→ astuner install verl\n" in out


def test_a_good_environment(small_is_installed: None):
    verl = report("verl")
    assert (verl.state, verl.folder) == ("ready", str(EnvDir.of("verl").folder))
    # It has another astuner than the one that examines it, which is a note.
    ((problem, fix, broken),) = problems_in(verl)
    assert problem.startswith("it has astuner 0.0.1 from astuner==0.0.1, but this is astuner ")
    assert (fix, broken) == ("astuner install verl --cpu", False)


def test_an_interrupted_installation(spec: EnvSpec):
    EnvDir.of("verl").mark_incomplete()
    assert report("verl").state == "broken"
    with EnvDir.of("verl").locked_for_install():
        assert problems("verl")[0][0] == "the installation is in progress"
    assert problems("verl") == [("the installation was interrupted", "astuner install verl", True)]


def test_packages_that_are_missing_or_changed(
    small_is_installed: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    metadata = packages() / "backend-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.5"))
    expected = "changed since the installation: backend==1.0 (1.5 is installed)"
    assert problems("verl")[0] == (expected, "astuner install verl --cpu --fresh", True)
    shutil.rmtree(metadata.parent)
    assert "backend==1.0 (not installed)" in problems("verl")[0][0]
    monkeypatch.setattr(sys, "argv", ["astuner", "doctor", "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["verl"]["state"] == "broken"
    assert shown["verl"]["findings"][0]["fix"] == "astuner install verl --cpu --fresh"
    assert set(shown) == {"debug", "local", "verl", "trinity", "machine"}


def test_a_lock_file_that_changed(small_is_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_spec(small_spec(tmp_path, "more==1.0"), monkeypatch)
    verl = report("verl")
    assert (
        "installed from an older lock file than the current small",
        "astuner install verl --cpu",
        False,
    ) in problems_in(verl)
    assert verl.state == "ready"


def test_builds_of_pytorch(
    request_for: RequestFor,
    index: Index,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install_gpus: Callable[[int], None],
):
    index.add("torch", "2.13.0", {"torch/__init__.py": "", "torch/version.py": "cuda = None\n"})
    spec = use_spec(small_spec(tmp_path, "torch==2.13.0"), monkeypatch)
    install(request_for(spec=spec), print)
    (packages() / "torch" / "version.py").write_text("cuda = '13.0'\n")
    problem, fix, broken = problems("verl")[0]
    assert problem == "torch 2.13.0 is built for CUDA 13.0, but the environment is for the CPU"
    assert fix.startswith("astuner install verl --cpu --fresh")
    assert broken
    (packages() / "torch" / "version.py").write_text("cuda = None\n")
    install_gpus(1)
    assert (
        "the environment is for the CPU, but this machine has a GPU",
        "astuner install verl --cuda",
        False,
    ) in problems("verl")
    use_spec(replace(spec, device="cuda"), monkeypatch)
    assert "is built without CUDA, but the environment is for CUDA" in problems("verl")[0][0]


def test_torchvision_of_another_build(small_is_installed: None):
    (packages() / "torchvision").mkdir()
    (packages() / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    problem, fix, broken = problems("verl")[0]
    assert "operator nms does not exist" in problem
    assert fix.endswith("pip uninstall --yes torchvision")
    assert broken


def test_packages_that_conflict(request_for: RequestFor, index: Index, tmp_path: Path):
    index.add("agent", "1.0", {"agent.py": ""}, ["backend<2", 'unheard; extra == "all"', 'old; python_version < "3"'])
    (tmp_path / "extra.txt").write_text("agent\n")
    install(request_for(extra=(tmp_path / "extra.txt",)), print)
    assert report("verl").state == "ready"
    metadata = packages() / "agent-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("backend<2", "backend>=2"))
    assert problems("verl")[0][0] == "packages conflict: agent 1.0 needs backend>=2 (1.0 is installed)"
    (tmp_path / "extra.txt").unlink()
    assert any("requirement files of the installation no longer exist" in problem for problem, _, _ in problems("verl"))


def test_a_missing_interpreter(small_is_installed: None):
    (EnvDir.of("verl").folder / "bin" / "python").unlink()
    ((problem, fix, broken),) = problems("verl")
    assert "cannot be started" in problem
    assert (fix, broken) == ("astuner install verl --cpu --fresh", True)


def test_the_machine(spec: EnvSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 60)
    machine = report("machine")
    assert ("export RAY_TMPDIR=/tmp", False) in [(fix, broken) for _, fix, broken in problems_in(machine)]
    assert machine.state == "ready"


def test_the_machine_says_which_backbone_auto_is(install_gpus: Callable[[int], None]):
    assert report("machine").auto == "local (auto: this machine has no GPU)"
    install_gpus(4)
    assert report("machine").auto == "trinity (auto: this machine has 4 GPUs)"


@pytest.mark.parametrize("spec", ENV_SPECS, ids=lambda spec: spec.name)
def test_lock_files_meet_their_requirements(spec: EnvSpec):
    assert len(spec.pins) > 150
    assert all(version for version in spec.pins.values())
    assert list(spec.pins) == sorted(spec.pins)
    installed = {canonicalize_name(name): version for name, version in spec.pins.items()}
    assert unmet([*spec.requirements, *spec.runtime_requirements], installed.get) == []
    assert not {canonicalize_name(name) for name in spec.excluded} & set(installed)
    # Every one of them meets astuner's own requirements.
    assert unmet(doctor.astuner_requirements(), installed.get) == []
    assert ("never run" in spec.lock.read_text()) is not spec.tested
    if spec.device == "cpu":
        assert not [name for name in installed if name.startswith(("nvidia-c", "cuda-"))]


def test_specifications_by_backbone_and_device():
    assert BACKBONES == ("verl", "trinity")
    assert env_spec_for("verl", "cpu").name == "verl-cpu"
    assert env_spec_for("verl", "cpu", vllm=True).name == "verl-cpu-vllm"
    assert env_spec_for("verl", "cuda").name == "verl-cuda"
    assert env_spec_for("trinity", "cpu").name == "trinity-cpu"
    shared = env_spec_for("verl", "cpu").pins.items() - env_spec_for("verl", "cpu", vllm=True).pins.items()
    assert shared == set()  # --vllm adds packages and changes none
