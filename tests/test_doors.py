"""The optional parts are loaded when a run uses them, and the core stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from astuner.cli.main import astuner
from astuner.doors import DOORS, lazy_names, through_door
from astuner.launcher.starter import start_project

# Runs a command, and then writes the names of the loaded modules, and the lines of those of astuner, to the file in the
# first argument.
COUNTED = """
import atexit, json, sys
file = sys.argv.pop(1)
def write():
    modules = {
        name: len(open(module.__file__).readlines())
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "astuner" and getattr(module, "__file__", None)
    }
    json.dump([list(sys.modules), modules], open(file, "w"))
atexit.register(write)
from astuner.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "most_modules", "most_lines"),
    [
        (["--backbone=debug"], 150, 25_500),
        (["--backbone=local", "astuner.trainer_common.total_training_steps=1"], 180, 31_500),
    ],
    ids=["debug", "local"],
)
def test_a_run_of_a_new_project_loads_the_core_only(
    tmp_path: Path, arguments: list[str], most_modules: int, most_lines: int
):
    start_project(tmp_path, "chat")
    file = tmp_path / "modules.json"
    command = [sys.executable, "-c", COUNTED, str(file), "--conf", "agent.yaml", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=300)
    loaded: list[str]
    modules: dict[str, int]
    loaded, modules = json.loads(file.read_text())
    assert "astuner.backbone.training.run_inputs" in modules
    assert len(modules) <= most_modules, sorted(modules)
    assert sum(modules.values()) <= most_lines
    strangers = ["ray", "verl", "trinity", "vllm", "trl"]
    if arguments == ["--backbone=debug"]:
        strangers += ["peft", "matplotlib", "tensorboard", "astuner.backbone.local"]
        strangers += ["transformers.trainer", "transformers.optimization", "torch.utils.tensorboard"]
        assert "astuner.backbone.debug.backbone" in modules
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{each}." for each in strangers))] == []


PARTS = [(kind, name) for kind, parts in DOORS.items() for name in parts if name not in ("trinity", "verl")]


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_door_opens(kind: str, name: str):
    part = through_door(kind, name)
    assert part is getattr(sys.modules[DOORS[kind][name].partition(":")[0]], DOORS[kind][name].partition(":")[2])


def test_backbones_of_other_packages_are_where_the_table_says():
    for name in ("trinity", "verl"):
        module, _, attribute = DOORS["backbone"][name].partition(":")
        source = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
        assert f"\nclass {attribute}" in source.read_text()


def test_help_lists_every_command():
    context = astuner.make_context("astuner", [], resilient_parsing=True)
    names = astuner.list_commands(context)
    assert names == sorted(names)
    assert {"train", "eval", *DOORS["command"]} == set(names)
    for name in names:
        command = astuner.get_command(context, name)
        assert command is not None
        assert command.name == name
    assert astuner.get_command(context, "tune") is None


def test_a_missing_name_of_a_package_is_an_attribute_error():
    get = lazy_names("astuner.example", {"through_door": "astuner.doors"})
    assert get("through_door") is through_door
    with pytest.raises(AttributeError, match=r"module 'astuner\.example' has no attribute 'other'"):
        get("other")
