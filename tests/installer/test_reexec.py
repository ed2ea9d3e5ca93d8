"""Re-execution in a backbone's environment: the same command and process id, in another interpreter."""

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

from astuner.config.loading import BackboneChoice
from astuner.errors import InstallError
from astuner.installer import inspection, reexec
from astuner.installer.env_dir import EnvDir
from astuner.installer.env_specs import EnvSpec
from astuner.installer.inspection import Source
from astuner.installer.install import InstallRequest, install
from astuner.installer.reexec import enter_environment, missing_packages
from astuner.job import AstunerJob
from tests.installer.conftest import Index

RequestFor = Callable[..., InstallRequest]
REPOSITORY = Path(__file__).parents[2]

# The command, with the small specification for verl. The environment has a small astuner.
COMMAND = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from dataclasses import replace
from pathlib import Path
from astuner.cli.main import main
from astuner.installer import env_specs, inspection, reexec
from tests.installer.conftest import small_spec
env_specs.ENV_SPECS = (small_spec(Path(sys.argv.pop(1))),)
reexec.running_source = lambda: inspection.Source("astuner==0.0.1", False, "0.0.1")
sys.argv[0] = "astuner"
main()
"""


@pytest.fixture
def command(small_is_installed: None, tmp_path: Path) -> list[str]:
    """Start of an `astuner` command line, for a folder with a `run.yaml` for verl. verl is installed."""
    (tmp_path / "run.yaml").write_text(
        "astuner:\n  backbone: verl\n  model: {path: model}\n  rollout: {agentscope_workflow: a->B}\n"
        "  task_reader: {type: seeds, count: 4}\n"
    )
    return [sys.executable, "-c", COMMAND, str(REPOSITORY), str(tmp_path)]


def started(command: list[str], *arguments: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *arguments], env=inherited | variables, cwd=folder, stdout=pipe, stderr=pipe, text=True
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
def test_a_command_is_executed_in_the_environment(command: list[str], arguments: tuple[str, ...], tmp_path: Path):
    # A folder named like the package, as in a checkout, does not hide the installed package.
    (tmp_path / "astuner").mkdir()
    (tmp_path / "astuner" / "__main__.py").write_text("raise SystemExit('the wrong astuner')\n")
    run = started(command, *arguments, folder=tmp_path, KEPT="this")
    out, err = run.communicate(timeout=120)
    assert json.loads(out) == {
        "pid": run.pid,
        "arguments": list(arguments),
        "folder": str(tmp_path),
        "prefix": str(EnvDir.of("verl").folder),
        "path": str(EnvDir.of("verl").folder / "bin"),
        "kept": "this",
    }, err


def test_ctrl_c_reaches_the_run_and_its_environment_is_locked(
    command: list[str], request_for: RequestFor, tmp_path: Path
):
    run = started(command, "--conf", "run.yaml", "astuner.experiment_name=wait", folder=tmp_path)
    assert run.stdout is not None
    assert run.stdout.readline()
    with pytest.raises(InstallError, match="a run is using the environment of verl"):
        install(request_for(fresh=True), print)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert "KeyboardInterrupt" in err


def test_other_backbones_stay_in_this_environment(command: list[str], tmp_path: Path):
    run = started(command, "--conf", "run.yaml", "--backbone=debug", folder=tmp_path)
    out, err = run.communicate(timeout=120)
    assert out == ""
    assert "no a.py" in err


def test_an_environment_that_meets_the_requirements_is_used(
    request_for: RequestFor, index: Index, monkeypatch: pytest.MonkeyPatch
):
    assert missing_packages("verl") == ["backend==1.0 (not installed)"]
    index.add("backend", "1.0", {})
    monkeypatch.syspath_prepend(str(next(index.folder.glob("backend-1.0*"))))  # a wheel can be imported from
    assert missing_packages("verl") == []
    enter_environment(BackboneChoice("verl"))


@pytest.fixture
def small_verl(spec: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    """The small specification, from the running astuner. Executing its interpreter would end the tests."""

    def fail(*_arguments: Any) -> None:
        raise AssertionError("it was executed")

    monkeypatch.setattr(reexec, "running_source", lambda: Source("astuner==0.0.1", False, "0.0.1"))
    monkeypatch.setattr(os, "execv", fail)
    return spec


def test_a_missing_environment_is_reported_with_its_command(small_verl: EnvSpec, request_for: RequestFor):
    with pytest.raises(
        InstallError, match=r"environment, which is not installed; run: astuner install verl\n.*lacks back"
    ):
        enter_environment(BackboneChoice("verl"))
    EnvDir.of("verl").mark_incomplete()
    with pytest.raises(
        InstallError, match="environment, whose installation was interrupted; run: astuner install verl"
    ):
        enter_environment(BackboneChoice("verl"))
    with EnvDir.of("verl").locked_for_install(), pytest.raises(InstallError, match="is being installed; wait"):
        enter_environment(BackboneChoice("verl"))
    enter_environment(BackboneChoice("debug"))
    enter_environment(BackboneChoice("local"))


def test_broken_environments_are_not_entered(
    small_verl: EnvSpec, small_is_installed: None, monkeypatch: pytest.MonkeyPatch
):
    folder = EnvDir.of("verl").folder
    monkeypatch.setenv("ASTUNER_ENTERED_ENVIRONMENT", str(folder))
    with pytest.raises(InstallError, match=r"lacks backend==1\.0 .*; run: astuner install verl --cpu --fresh"):
        enter_environment(BackboneChoice("verl"))
    monkeypatch.setattr(reexec, "running_source", lambda: Source("/another", True, "0.0.1"))
    with pytest.raises(InstallError, match=r"has astuner 0\.0\.1 from astuner==0\.0\.1, but this is .* from /another"):
        enter_environment(BackboneChoice("verl"))
    monkeypatch.setenv("PYTHONPATH", "/another")  # which the environment's interpreter inherits
    with pytest.raises(InstallError, match="lacks backend"):
        enter_environment(BackboneChoice("verl"))
    (folder / "bin" / "python").unlink()
    with pytest.raises(InstallError, match=r"has lost its interpreter .*; run: astuner install verl --cpu --fresh"):
        enter_environment(BackboneChoice("verl"))


def test_a_job_in_python_cannot_switch_environments(small_verl: EnvSpec, request_for: RequestFor):
    job = AstunerJob(backbone="verl", model="model")
    with pytest.raises(
        InstallError, match=r"run `astuner install verl`, then run your program with .*/verl/bin/python"
    ):
        job.tune()
    install(request_for(), print)
    with pytest.raises(InstallError, match=r"another environment: run your program with .*/verl/bin/python"):
        job.tune()


def test_install_commands_repeat_the_options(small_verl: EnvSpec, request_for: RequestFor, tmp_path: Path):
    verl = EnvDir.of("verl")
    assert verl.install_command() == "astuner install verl"
    (tmp_path / "extra.txt").write_text("")
    install(request_for(extra=(tmp_path / "extra.txt",)), print)
    assert verl.install_command() == "astuner install verl --cpu"
    assert verl.install_command(fresh=True) == f"astuner install verl --cpu --fresh --with {tmp_path}/extra.txt"


def test_the_source_of_astuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Index):
    running = inspection.running_source()
    assert (running.requirement, running.editable) == (str(REPOSITORY), True)
    assert "--editable" in running.pip_arguments
    assert any(line.startswith("torch") for line in inspection.astuner_requirements())
    # Installed from a file, an index, or a repository.
    site = tmp_path / "site"
    wheel = index.folder / "astuner-0.0.1-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr("astuner.__file__", str(site / "astuner" / "__init__.py"))
    origin = site / "astuner-0.0.1.dist-info" / "direct_url.json"
    assert inspection.running_source() == Source("astuner==0.0.1", False, "0.0.1")
    origin.write_text(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert inspection.running_source().pip_arguments == [f"astuner @ {wheel.as_uri()}"]
    origin.write_text(json.dumps({"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "abc"}}))
    assert inspection.running_source().requirement == "astuner @ git+https://x/y@abc"
    origin.write_text(json.dumps({"url": "file:///gone/astuner.whl", "archive_info": {}}))
    with pytest.raises(InstallError, match=r"/gone/astuner\.whl, which no longer exists"):
        inspection.running_source()
