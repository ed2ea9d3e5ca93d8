"""`astuner init`: the starter project runs without changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from astuner.cli.main import astuner
from astuner.errors import ConfigError
from astuner.launcher.starter import TEMPLATES, start_project
from astuner.run_record import read_index, read_summary
from astuner.system.localhost import free_port
from tests.launcher.debug_client import client_of, line_of, stopped_at
from tests.preloaded import AstunerProcess, run_python

ROOT = Path(__file__).parents[2]


def test_the_project_runs_by_its_launch_json_and_trains(tmp_path: Path):
    output = CliRunner().invoke(astuner, ["init", str(tmp_path / "project")], catch_exceptions=False).output
    assert f"wrote {tmp_path / 'project/.vscode/launch.json'}" in output
    assert output.splitlines()[-1].endswith("astuner --conf agent.yaml --backbone=debug")
    project = tmp_path / "project"
    (configuration, _) = json.loads((project / ".vscode/launch.json").read_text())["configurations"]
    assert (configuration["type"], configuration["request"]) == ("debugpy", "launch")
    assert configuration["args"][:4] == ["--backbone", "debug", "--conf", "agent.yaml"]
    trains = ["--conf", "agent.yaml", "astuner.trainer_common.total_training_steps=12"]
    for arguments in (configuration["args"], trains):
        ended = run_python(configuration["program"], *arguments, cwd=project)
        assert ended.returncode == 0, ended.stderr
    assert read_summary(project / "launcher_record/agent-debug").episodes.ok == 16
    validation = read_summary(project / "launcher_record/agent").validation
    assert validation.before is not None
    assert validation.after is not None
    assert (validation.before.reward or 0.0) < (validation.after.reward or 0.0)


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("agentscope", 1),
        ("openai", 1),
        ("two-agents", 2),
        ("command", 1),
        ("gymnasium", 4),
        pytest.param("langgraph", 1, marks=pytest.mark.langgraph),
    ],
)
def test_every_template_runs_as_it_is(tmp_path: Path, template: str, calls: int):
    output = CliRunner().invoke(astuner, ["init", str(tmp_path), "--template", template], catch_exceptions=False).output
    assert output.splitlines()[-1].endswith("astuner --conf agent.yaml --backbone=debug")
    names = {path.name for path in tmp_path.iterdir()}
    assert ("judge.py" in names) == (template not in ("gymnasium", "command"))
    with (tmp_path / "out.txt").open("w") as out:
        arguments = ("--conf", "agent.yaml", "--backbone=debug", "astuner.debug.debug_first_n_tasks=1")
        ended = AstunerProcess(*arguments, "astuner.rollout.num_repeat=2", cwd=tmp_path, output=out).wait(300)
    printed = (tmp_path / "out.txt").read_text()
    assert ended == 0, printed
    assert "assistant " in printed or "solver " in printed
    entries = read_index(tmp_path / "launcher_record/agent-debug")
    assert [entry.status for entry in entries] == ["ok", "ok"]
    assert {entry.calls for entry in entries} == {calls}


def test_templates_are_those_of_the_folder():
    folders = {path.name for path in (ROOT / "astuner/launcher/starter_templates").iterdir()}
    assert {"chat", *folders} == set(TEMPLATES)


def test_a_template_names_the_package_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    output = CliRunner().invoke(astuner, ["init", str(tmp_path), "--template=gymnasium"]).output
    assert 'the template needs gymnasium: pip install "astuner[gymnasium]"' in output


# The imports of an interpreter take fifteen seconds of processor time in a debugger.
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_launch_configuration_stops_at_a_breakpoint_of_the_editor(tmp_path: Path, is_forked: bool):
    start_project(tmp_path)
    (configuration, _) = json.loads((tmp_path / ".vscode/launch.json").read_text())["configurations"]
    port = free_port()
    # The same arguments as VS Code passes to debugpy.
    command = [] if is_forked else ["-Xfrozen_modules=off"]
    command += ["-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    command += [configuration["program"], *configuration["args"], "astuner.debug.debug_first_n_tasks=1"]
    line = line_of(tmp_path / "agent.py", 'bp("ANSWER")')
    command += ["astuner.rollout.num_repeat=2"]
    with client_of(tmp_path / "agent.py", command, port, [line], is_forked=is_forked) as client:
        stops = [stopped_at(client, "self") for _ in range(2)]
        client.event("terminated")
    assert [stop[:2] for stop in stops] == [("execute", line)] * 2
    assert read_summary(tmp_path / "launcher_record/agent-debug").episodes.ok == 2


def test_the_launcher_of_the_repository_is_the_starter_projects():
    assert (ROOT / "launcher.py").read_text() == (ROOT / "astuner/launcher/starter_project/launcher.py").read_text()


def test_existing_files_are_not_overwritten(tmp_path: Path):
    (tmp_path / "judge.py").write_text("mine")
    first, again = start_project(tmp_path), start_project(tmp_path)
    assert first.existing == ("judge.py",)
    assert (tmp_path / "judge.py").read_text() == "mine"
    assert again.written == ()
    assert set(again.existing) == {*first.written, "judge.py"}
    output = CliRunner().invoke(astuner, ["init", str(tmp_path)], catch_exceptions=False).output
    assert f"skipped {tmp_path / 'judge.py'}, which already exists" in output


def test_a_file_instead_of_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*give `astuner init` a writable folder"):
        start_project(tmp_path / "file")


def test_a_folder_with_a_space_is_quoted_and_an_existing_agent_must_be_named(tmp_path: Path):
    folder = tmp_path / "my folder"
    output = CliRunner().invoke(astuner, ["init", str(folder)], catch_exceptions=False).output
    assert f"next: cd '{folder}' && astuner --conf agent.yaml" in output
    (tmp_path / "other").mkdir()
    (tmp_path / "other/agent.py").write_text("mine = 1\n")
    output = CliRunner().invoke(astuner, ["init", str(tmp_path / "other")], catch_exceptions=False).output
    assert "change them to yours" in output
    assert "next:" not in output
