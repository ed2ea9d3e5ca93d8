"""Going on in a backbone's environment: the same command and process id, in another interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner.errors import InstallError
from astuner.job import AstunerJob
from astuner.launcher.environments import entering, source
from astuner.launcher.environments.entering import enter_environment, install_command, lacking_here
from astuner.launcher.environments.install import Wish, install
from astuner.launcher.environments.places import Place
from astuner.launcher.environments.recipes import Recipe
from astuner.launcher.environments.source import Source
from tests.launcher.environments.conftest import Index

Making = Callable[..., Wish]
REPOSITORY = Path(__file__).parents[3]

# The command, with the small recipe for verl; the environment that it goes on in has a small astuner of its own.
COMMAND = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from dataclasses import replace
from pathlib import Path
from astuner.cli import main
from astuner.launcher.environments import entering, recipes, source
from tests.launcher.environments.conftest import small_recipe
recipes.RECIPES = (small_recipe(Path(sys.argv.pop(1))),)
entering.running_source = lambda: source.Source("astuner==0.0.1", False, "0.0.1")
sys.argv[0] = "astuner"
main()
"""


@pytest.fixture
def command(wish: Making, tmp_path: Path) -> list[str]:
    """Start of an `astuner` command line, in a folder with `run.yaml` of the verl backbone and an installed verl."""
    install(wish(), print)
    (tmp_path / "run.yaml").write_text(
        "astuner:\n  backbone: verl\n  model: {path: model}\n  rollout: {agentscope_workflow: a->B}\n"
    )
    return [sys.executable, "-c", COMMAND, str(REPOSITORY), str(tmp_path)]


def started(command: list[str], *arguments: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *arguments], env=kept | variables, cwd=folder, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--conf", "run.yaml", "astuner.data.train_batch_size=3"),
        ("--conf", "run.yaml", "--backbone=verl", "--with-logview"),
        ("eval", "--conf", "run.yaml", "--tasks", "3"),
        ("check", "--conf", "run.yaml", "--dry-run"),
    ],
)
def test_a_command_goes_on_in_the_environment(command: list[str], arguments: tuple[str, ...], tmp_path: Path):
    # A folder of the package's name, as in a checkout, is not taken for what is installed.
    (tmp_path / "astuner").mkdir()
    (tmp_path / "astuner" / "__main__.py").write_text("raise SystemExit('the wrong astuner')\n")
    run = started(command, *arguments, folder=tmp_path, KEPT="this")
    out, err = run.communicate(timeout=120)
    assert json.loads(out) == {
        "pid": run.pid,
        "arguments": list(arguments),
        "folder": str(tmp_path),
        "prefix": str(Place.of("verl").folder),
        "path": str(Place.of("verl").folder / "bin"),
        "kept": "this",
    }, err


def test_ctrl_c_reaches_it_and_its_environment_stays_while_it_runs(command: list[str], wish: Making, tmp_path: Path):
    run = started(command, "--conf", "run.yaml", "astuner.experiment_name=wait", folder=tmp_path)
    assert run.stdout is not None
    assert run.stdout.readline()
    with pytest.raises(InstallError, match="a run is using the environment of verl"):
        install(wish(fresh=True), print)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert "KeyboardInterrupt" in err


def test_another_backbone_stays(command: list[str], tmp_path: Path):
    run = started(command, "--conf", "run.yaml", "--backbone=debug", folder=tmp_path)
    out, err = run.communicate(timeout=120)
    assert out == ""
    assert "no a.py" in err


def test_an_environment_that_has_it_all_stays(wish: Making, index: Index, monkeypatch: pytest.MonkeyPatch):
    assert [str(lack) for lack in lacking_here("verl")] == ["backend==1.0 (not installed)"]
    index.add("backend", "1.0", {})
    monkeypatch.syspath_prepend(str(next(index.folder.glob("backend-1.0*"))))  # a wheel can be imported from
    assert lacking_here("verl") == []
    enter_environment("verl")


@pytest.fixture
def built(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The small recipe, of a backbone that this version has; entering its environment would end the tests."""

    def refuse(*_arguments: Any) -> None:
        raise AssertionError("it was entered")

    monkeypatch.setattr(entering, "running_source", lambda: Source("astuner==0.0.1", False, "0.0.1"))
    monkeypatch.setattr(os, "execv", refuse)
    return recipe


def test_what_is_not_there_is_named_with_its_command(built: Recipe, wish: Making):
    with pytest.raises(InstallError, match=r"environment is not installed; run: astuner install verl\n.*lacks back"):
        enter_environment("verl")
    Place.of("verl").begin()
    with pytest.raises(InstallError, match="its installation was interrupted; run: astuner install verl"):
        enter_environment("verl")
    with Place.of("verl").kept_for_installing(), pytest.raises(InstallError, match="is being installed just now"):
        enter_environment("verl")
    enter_environment("debug")
    enter_environment("local")


def test_broken_environments_are_not_entered(built: Recipe, wish: Making, monkeypatch: pytest.MonkeyPatch):
    install(wish(), print)
    folder = Place.of("verl").folder
    monkeypatch.setenv("ASTUNER_ENTERED_ENVIRONMENT", str(folder))
    with pytest.raises(InstallError, match=r"lacks backend==1\.0 .*; run: astuner install verl --cpu --fresh"):
        enter_environment("verl")
    monkeypatch.setattr(entering, "running_source", lambda: Source("/another", True, "0.0.1"))
    with pytest.raises(InstallError, match=r"has astuner 0\.0\.1 from astuner==0\.0\.1, and this is .* from /another"):
        enter_environment("verl")
    monkeypatch.setenv("PYTHONPATH", "/another")  # which the environment's interpreter will follow, too
    with pytest.raises(InstallError, match="lacks backend"):
        enter_environment("verl")
    (folder / "bin" / "python").unlink()
    with pytest.raises(InstallError, match=r"has lost its Python .*; run: astuner install verl --cpu --fresh"):
        enter_environment("verl")


def test_a_job_in_python_cannot_move(built: Recipe, wish: Making):
    job = AstunerJob(backbone="verl", model="model")
    with pytest.raises(InstallError, match=r"`astuner install verl`, then run your program with .*/verl/bin/python"):
        job.tune()
    install(wish(), print)
    with pytest.raises(InstallError, match=r"another environment: run your program with .*/verl/bin/python"):
        job.tune()


def test_commands_repeat_what_was_asked_for(built: Recipe, wish: Making, tmp_path: Path):
    assert install_command("verl") == "astuner install verl"
    (tmp_path / "mine.txt").write_text("")
    install(wish(extra=(tmp_path / "mine.txt",)), print)
    assert install_command("verl") == "astuner install verl --cpu"
    assert install_command("verl", fresh=True) == f"astuner install verl --cpu --fresh --with {tmp_path}/mine.txt"


def test_where_astuner_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Index):
    found = source.running_source()
    assert (found.requirement, found.editable) == (str(REPOSITORY), True)
    assert "--editable" in found.arguments
    assert any(line.startswith("torch") for line in source.own_requirements())
    # As it is installed from a file, an index, or a repository.
    site = tmp_path / "site"
    wheel = index.folder / "astuner-0.0.1-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr("astuner.__file__", str(site / "astuner" / "__init__.py"))
    origin = site / "astuner-0.0.1.dist-info" / "direct_url.json"
    assert source.running_source() == Source("astuner==0.0.1", False, "0.0.1")
    origin.write_text(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert source.running_source().arguments == [f"astuner @ {wheel.as_uri()}"]
    origin.write_text(json.dumps({"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "abc"}}))
    assert source.running_source().requirement == "astuner @ git+https://x/y@abc"
    origin.write_text(json.dumps({"url": "file:///gone/astuner.whl", "archive_info": {}}))
    with pytest.raises(InstallError, match=r"/gone/astuner\.whl, which is no longer there"):
        source.running_source()
