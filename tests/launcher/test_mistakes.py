"""Mistakes in configuration, data, model and plug-ins, as the command answers them before anything is run."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from safetensors.torch import load_file, save_file

from astuner.cli.main import astuner as command
from tests.launcher.conftest import Command, write_rows

TRAINING = "task_reader.dataset_file.training.file_path"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("rum.yaml", None, ("no file rum.yaml", "did you mean run.yaml?")),
        ("model", None, ("model is a folder", "expected a YAML file")),
        ("empty.yaml", "", ("the model to train is missing", "the workflow to tune is missing", "under `astuner:`")),
        ("broken.yaml", "astuner:\n  model: {path: x\n", ("broken.yaml:", "not valid YAML")),
        ("no_tasks.yaml", "astuner: {model: {path: model}, rollout: {agentscope_workflow: agents->Answers}}\n",
         ("names no tasks; add the section task_reader under `astuner:`", "type: dataset_file", "type: seeds, count: 64")),
        ("list.yaml", "- astuner\n", ("list.yaml",)),
        ("binary.yaml", "\x00\x01", ("binary.yaml",)),
        ("typo.yaml", "astuner:\n  rollout:\n    num_repaet: 4\n", ("typo.yaml:3", "did you mean 'astuner.rollout.num_repeat'?")),
    ],
)  # fmt: skip
def test_yaml_files(astuner: Command, folder: Path, name: str, content: str | None, parts: tuple[str, ...]):
    if content is not None:
        (folder / name).write_text(content)
    astuner("--conf", name).says(*parts)
    assert not (folder / "launcher_record").exists()


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("rolout.num_repeat=3", ("command line", "'astuner.rolout.num_repeat'", "did you mean 'astuner.rollout.num_repeat'?")),
        ("rollout.num_repeat", ("command line", "has no value; write astuner.rollout.num_repeat=VALUE")),
        ("rollout.num_repeat=many", ("command line", "is 'many'", "expected a whole number")),
        ("backbone=vrel", ("'vrel'", "'debug', 'local', 'trinity' or 'verl'", "did you mean 'verl'?")),
        ("trainer_common.logger=[wandb]", ("wandb", "not installed", "pip install wandb")),
    ],
)  # fmt: skip
def test_settings(train: Command, setting: str, parts: tuple[str, ...]):
    train(setting).says(*parts)


def test_unknown_commands(astuner: Command, folder: Path):
    for arguments, part in (
        (("tran", "--conf", "run.yaml"), "did you mean 'train'?"),
        (("run.yaml",), "run: astuner --conf run.yaml"),
        (
            ("sing",),
            f"the commands are: {', '.join(command.list_commands(click.Context(command)))}",
        ),
        (("--conf", "run.yaml", "--backbnoe", "local"), "'--backbnoe'"),
        (("eval", "--conf", "run.yaml", "--tasks", "0"), "x>=1"),
    ):
        ended = astuner(*arguments)
        assert ended.code == 2
        assert part in ended.out


def test_backbones(astuner: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    astuner("--conf", "run.yaml", "--backbone", "foo").says(
        "--backbone", "'foo'", "'debug', 'local', 'trinity' or 'verl'"
    )
    astuner("--conf", "run.yaml", "--backbone", "trinity").says(
        "backbone 'trinity' runs in a separate environment, which is not installed", "run: astuner install trinity"
    )
    real = importlib.util.find_spec

    def without_peft(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "peft" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_peft)
    astuner("--conf", "run.yaml").says("backbone 'local' needs peft, which is not installed", "pip install astuner")
    monkeypatch.setattr(importlib.util, "find_spec", real)
    (folder / "launcher_record").mkdir()
    assert astuner("check", "--conf", "run.yaml").code == 0


def test_data_files(train: Command, astuner: Command, folder: Path):
    train(f"{TRAINING}=trian.jsonl").says("no file", str(folder / "trian.jsonl"), "Did you mean train.jsonl")
    (folder / "nothing.jsonl").write_text("")
    train(f"{TRAINING}=nothing.jsonl").says("nothing.jsonl: no training tasks")
    (folder / "bad.jsonl").write_text('{"question": "a"}\n{"question": "b"\n[1]\n{"x": 1}\n')
    train(f"{TRAINING}=bad.jsonl").says(
        "bad.jsonl: 3 of 4 rows cannot be read",
        "line 2: not JSON: Expecting ',' delimiter at column 17",
        "line 3: is of type list",
        "line 4: no question",
        "skip_bad_rows: true",
    )
    ended = train(f"{TRAINING}=bad.jsonl", "task_reader.dataset_file.skip_bad_rows=true")
    assert ended.code == 0, ended.out
    assert "line 2: not JSON" in ended.out
    assert "skipped 3 invalid rows" in (folder / "launcher_record/run/run.log").read_text()
    assert (
        "--tasks is 5, but the number of validation tasks is 1; all are used"
        in astuner("eval", "--conf", "run.yaml", "--tasks", "5").out
    )
    astuner("eval", "--conf", "run.yaml", "astuner.task_reader.dataset_file.validation.file_path=").says(
        "there are no validation tasks", "astuner.task_reader"
    )
    astuner("eval", "--conf", "run.yaml", "astuner.trainer_common.algorithm=sft").says("sft", "val/loss")


def _without(*names: str) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return spoil


def _change_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        content = json.loads((model / name).read_text()) | changes
        (model / name).write_text(json.dumps(content))

    return spoil


def _cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def _drop_a_weight(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(text) and None


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (_without("config.json"), ("has no config.json", "but contains", "tokenizer.json")),
        (_without("model.safetensors"), ("cannot be loaded as a causal language model", "model.safetensors")),
        (_write("model.safetensors", "garbage"), ("cannot be loaded as a causal language model", "header")),
        (_cut_weights, ("cannot be loaded as a causal language model", "header")),
        (_drop_a_weight, ("weights do not fit config.json", "layers.0.self_attn.q_proj.weight is missing")),
        (_change_json("config.json", hidden_size=48), ("weights do not fit config.json", "shape", "more)")),
        (_change_json("config.json", model_type="frobnicate"), ("frobnicate",)),
        (_write("config.json", '{"model_type": '), ("not a valid JSON file",)),
        (_without("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), ("has no tokenizer", "tokenizer.json")),
        (_write("tokenizer.json", "{}"), ("the tokenizer cannot be loaded",)),
    ],
)  # fmt: skip
def test_folders_without_a_complete_model(
    train: Command, folder: Path, spoil: Callable[[Path], None], parts: tuple[str, ...]
):
    spoil(folder / "model")
    train().says("model.path", *parts)


def test_an_evaluation_records_the_model_that_it_evaluates(astuner: Command, folder: Path):
    shutil.copytree(folder / "model", folder / "other")
    ended = astuner("eval", "--conf", "run.yaml", "--model", "./other")
    assert ended.code == 0, ended.out
    assert 'path: "./other"' in (folder / "launcher_record/run-eval/config.yaml").read_text()
    tuned = folder / "launcher_record/tuned"
    shutil.copytree(folder / "model", tuned / "model")
    (tuned / "environment.json").write_text('{"record_format": 1}')
    ended = astuner("eval", "--conf", "run.yaml", "--model", "tuned")
    assert ended.code == 0, ended.out
    assert "path: launcher_record/tuned/model" in (folder / "launcher_record/run-eval/config.yaml").read_text()
    shutil.rmtree(tuned / "model")
    astuner("eval", "--conf", "run.yaml", "--model", "tuned").says("a run that has not finished: its tuned model is")


def test_places_without_a_model(train: Command, astuner: Command, folder: Path):
    train("model.path=./modle").says("model.path is './modle', which does not exist", "did you mean 'model'?")
    train("model.path=train.jsonl").says("train.jsonl', which is a file")
    train("model.path=some/model").says("model.path 'some/model'", "Use a folder")
    astuner("eval", "--conf", "run.yaml", "--model", "./modle").says("--model is './modle', which does not exist")
    near_runs = ("eval", "--conf", "run.yaml", "--model", "launcher_record/other")
    astuner(*near_runs).says("--model is 'launcher_record/other', which does not exist: no run of this name")
    (folder / "launcher_record/other/checkpoints/step_000002/model").mkdir(parents=True)
    (folder / "launcher_record/other/environment.json").touch()
    astuner(*near_runs).says("a run that has not finished: its tuned model is written at the end")
    (folder / "launcher_record/other/checkpoints/step_000002/model/config.json").touch()
    astuner(*near_runs).says("its last checkpoint has", "checkpoints/step_000002/model'")
    train("model.path='agents->nothing'").says("`agents->nothing`", "has no nothing")
    train("model.path='agents->broken_function'").says(
        "did not return a folder", "the disk was not found", "agents.py:"
    )


def test_renderers_and_chat_templates(train: Command, folder: Path):
    train("model.renderer=qwem3").says("model.renderer 'qwem3' is unknown", "did you mean 'qwen3'?", "llama-3")
    train("model.renderer={name: qwen3, thinking_hard: true}").says("thinking_hard: Extra inputs are not permitted")
    train("model.renderer=llama-3").says("does not fit the tokenizer")
    (folder / "model/chat_template.jinja").unlink()
    train("model.renderer=auto").says("has no chat template", "model.renderer to the model's family")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("agents.Agent", ("'agents.Agent' is not of the form `package.module->Name`",)),
        ("agnets->Agent", ("no agnets.py", "Did you mean `agents->Agent`?")),
        ("agents->Agnet", ("agents.py has no Agnet", "Did you mean Agent")),
        ("agents->NoWorkflow", ("expected one that derives from astuner.workflow.Workflow",)),
        ("agents->IsAbstract", ("does not define execute",)),
        ("agents->broken_function", ("is a function without `async`", "write `async def broken_function")),
        ("broken->Agent", ("importing", "SyntaxError", "broken.py:2")),
        ("lacking->Agent", ("ModuleNotFoundError", "not_installed_anywhere", "lacking.py:1")),
        ("leaving->Agent", ("SystemExit: 4", "leaving.py:1")),
    ],
)
def test_workflows_that_are_none(train: Command, folder: Path, path: str, parts: tuple[str, ...]):
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    (folder / "lacking.py").write_text("import not_installed_anywhere\n")
    (folder / "leaving.py").write_text("raise SystemExit(4)\n")
    train(f"rollout.agentscope_workflow='{path}'").says(path, *parts)


def test_a_judge_that_cannot_be_made(train: Command, folder: Path):
    train("task_judge.judge_protocol='agents->JudgeCannotBeMade'").says(
        "`agents->JudgeCannotBeMade` could not be created", "the grader's address is not set", "agents.py:"
    )


def test_folders_for_the_record(train: Command, astuner: Command, folder: Path):
    (folder / "file").write_text("")
    train("experiment_dir=file").says("cannot write the run record", "a file exists where a folder is needed")
    astuner("--conf", "run.yaml", "--exp-dir", "file").says("cannot write the run record", "--exp-dir")
    astuner("--conf", "run.yaml", "--exp-dir", "/proc/nowhere").says("cannot write the run record at /proc/nowhere")
    (folder / "notes").mkdir()
    (folder / "notes/mine.txt").write_text("mine")
    train("experiment_dir=notes").says("holds files, but no run record", "choose another experiment_name")
    assert (folder / "notes/mine.txt").read_text() == "mine"


def test_a_mistake_leaves_an_earlier_record_where_it_is(train: Command, folder: Path):
    assert train().code == 0
    before = {path: path.read_bytes() for path in (folder / "launcher_record/run").rglob("*") if path.is_file()}
    train(f"{TRAINING}=trian.jsonl").says("no file")
    train("model.path=./modle").says("does not exist")
    train("rollout.agentscope_workflow='agents->NoWorkflow'").says("derives")
    assert {path: path.read_bytes() for path in (folder / "launcher_record/run").rglob("*") if path.is_file()} == before
    assert [path.name for path in (folder / "launcher_record").glob("run*")] == ["run"]


def test_a_yaml_elsewhere_finds_what_lies_beside_it(astuner: Command, folder: Path):
    place = folder / "ein Ordner" / "ünï"
    place.mkdir(parents=True)
    for name in ("run.yaml", "agents.py", "val.jsonl"):
        (folder / name).rename(place / name)
    (folder / "model").rename(place / "model")
    write_rows(place / "tråin.jsonl", [{"question": "¿qué? [b]"}, {"question": "何"}])
    text = (place / "run.yaml").read_text().replace("train.jsonl", "tråin.jsonl").replace("agents->", "./agents.py->")
    (place / "mein Lauf é.yaml").write_text(text)
    ended = astuner("--conf", "ein Ordner/ünï/mein Lauf é.yaml")
    assert ended.code == 0, ended.out
    assert (folder / "launcher_record/mein Lauf é/summary.json").exists()
    checked = astuner("check", "--conf", "ein Ordner/ünï/mein Lauf é.yaml")
    assert checked.code == 0
    assert "¿qué? [b]" in checked.out


def test_the_model_of_a_run_is_an_option(astuner: Command, folder: Path, tmp_path: Path):
    astuner("--conf", "run.yaml", "--model", "./nothing").says("model.path is './nothing', which does not exist")
    name = "a 'model', of $5 with a \\ at its end \\"
    shutil.copytree(folder / "model", folder / name)
    ended = astuner("--conf", "run.yaml", "--model", name, "--backbone=debug")
    assert ended.code == 0, ended.out
    assert yaml.safe_load(Path("launcher_record/run-debug/config.yaml").read_text())["astuner"]["model"]["path"] == name


def test_missing_classes_files_and_models_are_told_before_pytorch_is_imported(folder: Path):
    commands = [
        (f"{TRAINING}=trian.jsonl", "did you mean train.jsonl"),
        ("model.path=./modle", "did you mean 'model'"),
        ("rollout.agentscope_workflow='agents->Wrokflow'", "has no wrokflow"),
    ]
    code = (
        "import sys\n"
        "from astuner.cli.main import main\n"
        "for setting in sys.argv[1:]:\n"
        "    sys.argv = ['astuner', '--conf', 'run.yaml', f'astuner.{setting}']\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 1\n"
        "assert not {'torch', 'transformers', 'datasets', 'agentscope'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", code, *(setting for setting, _ in commands)]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    for _, part in commands:
        assert part in ended.stderr.lower()
