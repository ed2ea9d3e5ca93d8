"""`astuner doctor`: what is wrong is found, and named with what mends it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from astuner.cli import main
from astuner.launcher.environments import doctor
from astuner.launcher.environments.doctor import Report, examine
from astuner.launcher.environments.install import Wish, install
from astuner.launcher.environments.places import Place
from astuner.launcher.environments.recipes import BACKBONES, RECIPES, Recipe, recipe_for
from astuner.launcher.environments.versions import plain_name, unmet
from tests.launcher.environments.conftest import Index, small_recipe, use_recipe

Making = Callable[..., Wish]


def report(backbone: str) -> Report:
    (found,) = [report for report in examine() if report.backbone == backbone]
    return found


def problems(backbone: str) -> list[tuple[str, str, bool]]:
    return [(finding.problem, finding.mend, finding.broken) for finding in report(backbone).findings]


def packages() -> Path:
    (folder,) = Place.of("verl").folder.glob("lib/python*/site-packages")
    return folder


def test_nothing_is_installed(recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert report("local").state == "ready"
    assert report("local").versions["torch"].startswith("2.")
    assert report("verl").state == "not installed"
    monkeypatch.setattr(sys, "argv", ["astuner", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "verl     not installed" in out
    assert "→ astuner install verl\n" in out


def test_a_good_environment(wish: Making):
    install(wish(), print)
    found = report("verl")
    assert (found.state, found.place) == ("ready", str(Place.of("verl").folder))
    # It has another astuner than the one that looks, which is worth a line.
    ((problem, mend, broken),) = problems("verl")
    assert problem.startswith("has astuner 0.0.1 from astuner==0.0.1; this is ")
    assert (mend, broken) == ("astuner install verl --cpu", False)


def test_an_interrupted_installation(recipe: Recipe):
    Place.of("verl").begin()
    assert report("verl").state == "broken"
    with Place.of("verl").kept_for_installing():
        assert problems("verl")[0][0] == "its installation goes on just now"
    assert problems("verl") == [("its installation was interrupted", "astuner install verl", True)]


def test_packages_that_are_missing_or_changed(
    wish: Making, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    install(wish(), print)
    metadata = packages() / "backend-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.5"))
    expected = "changed since it was installed: backend==1.0 (1.5 is there)"
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
    assert shown["verl"]["findings"][0]["mend"] == "astuner install verl --cpu --fresh"
    assert set(shown) == {"debug", "local", "verl", "trinity", "machine"}


def test_a_lock_file_that_changed(wish: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(wish(), print)
    use_recipe(small_recipe(tmp_path, "more==1.0"), monkeypatch)
    assert ("made from an older lock file than small now is", "astuner install verl --cpu", False) in problems("verl")
    assert report("verl").state == "ready"


def test_builds_of_pytorch(wish: Making, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index.add("torch", "2.13.0", {"torch/__init__.py": "", "torch/version.py": "cuda = None\n"})
    recipe = use_recipe(small_recipe(tmp_path, "torch==2.13.0"), monkeypatch)
    install(wish(recipe=recipe), print)
    (packages() / "torch" / "version.py").write_text("cuda = '13.0'\n")
    problem, mend, broken = problems("verl")[0]
    assert problem == "torch 2.13.0 is built for CUDA 13.0 in an environment for the CPU"
    assert mend.startswith("astuner install verl --cpu --fresh")
    assert broken
    (packages() / "torch" / "version.py").write_text("cuda = None\n")
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: True)
    assert ("for the CPU, and there is a GPU here", "astuner install verl --cuda", False) in problems("verl")
    use_recipe(replace(recipe, device="cuda"), monkeypatch)
    assert "is built without CUDA in an environment for CUDA" in problems("verl")[0][0]


def test_torchvision_of_another_build(wish: Making):
    install(wish(), print)
    (packages() / "torchvision").mkdir()
    (packages() / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    problem, mend, broken = problems("verl")[0]
    assert "operator nms does not exist" in problem
    assert mend.endswith("pip uninstall --yes torchvision")
    assert broken


def test_packages_that_contradict_each_other(wish: Making, index: Index, tmp_path: Path):
    index.add("agent", "1.0", {"agent.py": ""}, ["backend<2", 'unheard; extra == "all"', 'old; python_version < "3"'])
    (tmp_path / "mine.txt").write_text("agent\n")
    install(wish(extra=(tmp_path / "mine.txt",)), print)
    assert report("verl").state == "ready"
    metadata = packages() / "agent-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("backend<2", "backend>=2"))
    assert problems("verl")[0][0] == "packages contradict each other: agent 1.0 needs backend>=2 (1.0 is there)"
    (tmp_path / "mine.txt").unlink()
    assert any("requirements that went in are gone" in problem for problem, _, _ in problems("verl"))


def test_an_interpreter_that_is_gone(wish: Making):
    install(wish(), print)
    (Place.of("verl").folder / "bin" / "python").unlink()
    ((problem, mend, broken),) = problems("verl")
    assert "does not run" in problem
    assert (mend, broken) == ("astuner install verl --cpu --fresh", True)


def test_the_machine(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 60)
    assert ("export RAY_TMPDIR=/tmp", False) in [(mend, broken) for _, mend, broken in problems("machine")]
    assert report("machine").state == "ready"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_lock_files_have_what_they_are_for(recipe: Recipe):
    assert len(recipe.pins) > 150
    assert all(version for version in recipe.pins.values())
    assert list(recipe.pins) == sorted(recipe.pins)
    installed = {plain_name(name): version for name, version in recipe.pins.items()}
    assert unmet([*recipe.requirements, *recipe.suitable], installed) == []
    assert not {plain_name(name) for name in recipe.left_out} & set(installed)
    # astuner's own needs are met in every one of them.
    assert unmet(doctor.own_requirements(), installed) == []
    assert ("never run" in recipe.lock.read_text()) is not recipe.ran
    if recipe.device == "cpu":
        assert not [name for name in installed if name.startswith(("nvidia-c", "cuda-"))]


def test_recipes_by_what_is_asked():
    assert BACKBONES == ("verl", "trinity")
    assert recipe_for("verl", "cpu").name == "verl-cpu"
    assert recipe_for("verl", "cpu", vllm=True).name == "verl-cpu-vllm"
    assert recipe_for("verl", "cuda").name == "verl-cuda"
    assert recipe_for("trinity", "cpu").name == "trinity-cpu"
    shared = recipe_for("verl", "cpu").pins.items() - recipe_for("verl", "cpu", vllm=True).pins.items()
    assert shared == set()  # the option adds packages, and changes none
