"""The documentation is correct: its examples run, its links have targets, and its lists are complete.

Each page runs as a script in a new folder, block by block. A block whose first line is a comment with a file name is
written to that file. Python is executed, and the blocks of a page share their names. Every `astuner` command is run,
unless `.ci/run` runs the same command. Runs are made `small`; otherwise they are real.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import isfunction, signature
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from omegaconf import OmegaConf

from astuner import AstunerJob, Workflow
from astuner.analysis.benchmark.results import BenchResult, SeedResult
from astuner.cli.main import astuner as command
from astuner.config.data import TaskJudgeConfig
from astuner.config.loading import load_config
from astuner.config.services import BUILT_IN_SERVICES, ServiceConfig
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.run_record import read_metrics, read_summary
from astuner.run_record.plots import plot_run
from astuner.schema import Task, WorkflowTask
from astuner.task_judge.math_answer_as_judge import MathAnswerAsJudge
from astuner.task_runner.runner import TaskRunner
from astuner.workflow import workflow_factory
from tests.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/en"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *GUIDE.glob("*.md"), *(ROOT / "tutorial").glob("**/README.md")]
)
PAGES_WITH_RECORD = ("run_record.md", "how_it_works.md", "viewer.md", "rescore.md", "task_judger.md")
"""Pages that read `launcher_record/math_agent`, the run of the quick start."""

BASE = {"astuner": {"model": {"path": "some/model"}, "rollout": {"agentscope_workflow": "module->Class"}}}
"""The configuration into which a YAML fragment is merged."""

_FILE_NAME = re.compile(r"# ([\w./]+\.\w+)")
_MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:work|home|root|mnt|tmp|opt|data|srv|var|Users)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file name in the first line, if there is one."""
        match = _FILE_NAME.fullmatch(self.text.partition("\n")[0])
        return match[1] if match else None

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of each `astuner` command in the block."""
        lines = [line.strip().removeprefix("$ ") for line in re.split(r"\n|&&", self.text.replace("\\\n", " "))]
        return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("astuner ")]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str = "") -> list[Block]:
    fences = [token for token in tokens(page) if token.type == "fence" and language in ("", token.info.strip())]
    return [Block(page, token.map[0] + 1, token.info.strip(), token.content) for token in fences if token.map]


def all_blocks(language: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for page in PAGES for block in blocks(page, language)]


def every_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@cache
def ci_commands() -> list[list[str]]:
    """Return the `astuner` commands of `.ci/run`, with variables filled in and without the folder of the records."""
    text = (ROOT / ".ci/run").read_text()
    (main_yaml,) = re.findall(r"^main_yaml=(\S+)$", text, re.MULTILINE)
    text = (
        text.replace(' --exp-dir "$records"', "")
        .replace('"$main_yaml"', main_yaml)
        .replace("$records", "launcher_record")
    )
    return Block(ROOT / ".ci/run", 1, "bash", text).commands


def is_installed(block: Block) -> bool:
    """Return whether the agent framework that a block imports is installed; `.ci/frameworks` installs all of them."""
    imported = set(re.findall(r"^(?:from|import) (\w+(?:\.adk)?)", block.text, re.MULTILINE))
    return all(importlib.util.find_spec(name) is not None for name in FRAMEWORKS & imported)


SMALLER = {
    "frozenlake_tiny.yaml": ["astuner.task_reader.env_service.env_params={train_tasks: 4, validation_tasks: 4}"],
    "feedback_tracing.yaml": ["astuner.task_reader.feedback_tracing.validation_share=0.02"],
}
"""Settings of single configurations, beside those of `small`: 400 games of a random model would take a minute."""

VALIDATION_FILE = "task_reader.dataset_file.validation.file_path"
FRAMEWORKS = {"langgraph", "autogen_agentchat", "agents", "pydantic_ai", "smolagents", "google.adk"}


class PageRunner:
    """Runs pages in the working directory."""

    def __init__(self, small: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
        self._overrides = [f"astuner.{key}={value}" for key, value in small.items()]
        self._monkeypatch = monkeypatch
        # Workflows of other tests have added their folders, and modules with the names of libraries.
        others = ROOT / "tests"
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry).is_relative_to(others)])
        for name in FRAMEWORKS & sys.modules.keys():
            if Path(sys.modules[name].__file__ or "").is_relative_to(others):
                monkeypatch.delitem(sys.modules, name)
        tune = AstunerJob.tune
        # A page's job runs as written, with smaller sizes.
        monkeypatch.setattr(AstunerJob, "tune", lambda job, *args: tune(job.configure(dict(small)), *args))

    def run(self, page: Path) -> dict[str, Any]:
        """Run a page and return the names that its Python code defined."""
        names: dict[str, Any] = {"__name__": "page"}
        for block in blocks(page):
            if block.file is not None:
                Path(block.file).write_text(block.text)
            if block.language == "python" and block.file is not None:
                if is_installed(block):
                    module = Path(block.file).stem
                    self._monkeypatch.delitem(sys.modules, module, raising=False)  # of another test
                    names.update(vars(importlib.import_module(module)))
            elif block.language == "python":
                # Compile with the page's name and line, so that a traceback shows them.
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            elif block.language == "bash":
                for arguments in block.commands:
                    self.astuner(arguments)
        return names

    def astuner(self, arguments: list[str]) -> None:
        if arguments in ci_commands() or arguments[0] in ("view", "serve-tinker"):  # these serve until Ctrl-C
            return
        overrides = []
        if "--conf" in arguments:
            path = Path(arguments[arguments.index("--conf") + 1])
            overrides = [*self._overrides, *SMALLER.get(path.name, []), *fewer_validation_tasks(path)]
        if "--model" in arguments:  # written by an earlier command
            assert Path(arguments[arguments.index("--model") + 1]).is_dir()
        assert command.main([*arguments, *overrides], standalone_mode=False) in (None, 0)


def fewer_validation_tasks(conf: Path) -> list[str]:
    """Return an override with four validation tasks, if a function writes the file of all of them, such as 200."""
    made_by = OmegaConf.select(OmegaConf.load(conf), f"astuner.{VALIDATION_FILE}", default="")
    if "->" not in made_by:
        return []
    file = pkgutil.resolve_name(made_by.replace("->", ":"))()
    few = Path(f"few{file.suffix}").absolute()
    few.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    return [f"astuner.{VALIDATION_FILE}={few}"]


@pytest.fixture
def page_runner(small: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRunner]:
    (tmp_path / "tutorial").symlink_to(ROOT / "tutorial")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules_before = set(sys.modules)
    yield PageRunner(small, monkeypatch)
    # Several pages write files with the same name.
    for name in set(sys.modules) - modules_before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def finished_record(small: Mapping[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the record of a finished run, with every file that a record can contain."""
    folder = tmp_path_factory.mktemp("records")
    conf = folder / "math_agent.yaml"
    AstunerJob(
        experiment_name="read_yaml_name",
        trainer_common__val_before_train=True,
        trainer_common__save_freq=1,
        rollout__agentscope_workflow="tutorial.example_math_agent.math_agent->MathAgentWorkflow",
        task_judge__judge_protocol="astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge",
        services={"idle": {"command": "sleep 600"}},
    ).configure({**small, "trainer_common.total_training_steps": 2}).dump_job_as_yaml(conf)
    command.main(["--conf", str(conf), "--exp-dir", str(folder), "--with-idle"], standalone_mode=False)
    plot_run(folder / "math_agent")
    return folder / "math_agent"


@every_page()
def test_page_runs(page: Path, page_runner: PageRunner, tokenizer: Any, request: pytest.FixtureRequest):
    if page.name in PAGES_WITH_RECORD:
        Path("launcher_record").mkdir()
        Path("launcher_record/math_agent").symlink_to(request.getfixturevalue("finished_record"))
    if page.name == "serve_tinker.md":
        request.getfixturevalue("tinker_server")
    names = page_runner.run(page)
    for workflow in names.values():
        is_class = isinstance(workflow, type) and issubclass(workflow, Workflow) and workflow is not Workflow
        if is_class or (isfunction(workflow) and [*signature(workflow).parameters] == ["task", "model_tuner"]):
            assert_workflow_scores(workflow_factory(page.name, workflow), ChatCodec(tokenizer))


def assert_workflow_scores(workflow: Callable[[], Workflow], codec: ChatCodec) -> None:
    """Check that an episode with a model that answers correctly is scored."""
    answer = codec.tokenizer.encode("\\boxed{4}<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: answer, max_model_len=8192)
    runner = TaskRunner(workflow, MathAnswerAsJudge(TaskJudgeConfig()), engine, codec)
    task = WorkflowTask(Task("1", "What is 2 + 2?", metadata={"answer": "4", "seed": 1}), "page-1")
    settings = CallSettings(max_model_len=8192, max_prompt_length=8192, max_response_length=8192)
    episode = asyncio.run(runner.run(task, runner.tuner(task, settings)))
    assert episode.status == "ok", episode.error


@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_yaml_loads(block: Block, tmp_path: Path):
    for other in blocks(block.page, "yaml"):
        if other.file is not None:
            (tmp_path / other.file).write_text(other.text)
    fragment = tmp_path / "fragment.yaml"
    content = _merged(BASE, yaml.safe_load(block.text))
    astuner = content["astuner"]
    # Both replace the class.
    if (astuner.get("workflow") or {}).get("command") or astuner["rollout"].get("use_agentscope_protocol") is False:
        content = _merged(content, {"astuner": {"rollout": {"agentscope_workflow": None}}})
    fragment.write_text(yaml.safe_dump(content, sort_keys=False))
    load_config(fragment)


def _merged(base: Any, overrides: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(overrides, dict)):
        return overrides
    return base | {key: _merged(base.get(key), value) for key, value in overrides.items()}


@every_page()
def test_links_have_targets(page: Path):
    for target in links(page):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_is_linked():
    linked = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in links(page)}
    assert {page.resolve() for page in GUIDE.glob("*.md")} <= linked


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs/assets").glob("*.svg")), ids=lambda path: path.name)
def test_drawing_is_valid_and_has_dark_colors(drawing: Path):
    root = ElementTree.parse(drawing).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in drawing.read_text(encoding="utf-8")


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs.get("href") or child.attrs.get("src"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
    page_tokens = tokens(page)
    titles = [page_tokens[i + 1].content for i, token in enumerate(page_tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page()
def test_page_contains_no_machine_specific_path(page: Path):
    assert not _MACHINE_PATH.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("block", all_blocks("json"))
def test_json_parses(block: Block):
    json.loads(block.text)


def test_launch_json_of_the_starter_project_is_shown():
    (shown,) = blocks(GUIDE / "debugging.md", "json")
    assert shown.text == (ROOT / "astuner/launcher/starter_project/vscode/launch.json").read_text()


def table(page: str, first_cell: str) -> list[dict[str, str]]:
    """Return the rows of the table whose header starts with `first_cell`, as mappings from column to cell."""
    for header, *rows in tables(GUIDE / page):
        if header[0] == first_cell:
            return [dict(zip(header, row, strict=True)) for row in rows]
    raise AssertionError(f"{page} has no table whose header starts with {first_cell}")


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Yield each table as a list of rows of cells."""
    rows: list[list[str]] = []
    inside = False
    for token in tokens(page):
        if token.type == "table_open":
            inside, rows = True, []
        elif token.type == "table_close":
            inside = False
            yield rows
        elif token.type == "tr_open":
            rows.append([])
        elif inside and token.type == "inline":
            rows[-1].append(token.content)


def code_spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_serve_tinker_page_lists_every_option():
    serve_tinker = command.get_command(click.Context(command), "serve-tinker")
    assert serve_tinker is not None
    params = {param.opts[0]: param for param in serve_tinker.params}
    rows = {
        name: row["default"].strip("`")
        for row in table("serve_tinker.md", "option")
        for name in code_spans(row["option"])
    }
    assert rows.keys() == params.keys()
    assert rows == {name: str(param.default) if not param.required else "–" for name, param in params.items()}


def test_services_page_lists_every_key_and_built_in_service():
    config = {**ServiceConfig(command="x").model_dump(mode="json", exclude={"command"}), "command": ""}
    health = config.pop("health")
    expected = config | {f"health.{key}": value for key, value in health.items()}
    shown = {row["key"].strip("`"): row["default"].strip("`") for row in table("services.md", "key")}
    assert shown == {key: value if value == "" else json.dumps(value) for key, value in expected.items()}
    options = {name for row in table("services.md", "option") for name in code_spans(row["option"])}
    assert options == {f"--with-{name}" for name in BUILT_IN_SERVICES}


def test_run_record_page_names_every_file_and_metric(
    finished_record: Path, small: Mapping[str, object], tmp_path: Path
):
    listed = {name.strip("/") for row in table("run_record.md", "file") for name in code_spans(row["file"])}
    # Only a run with a fault has findings, one that a user annotates a note, and one that learns rubrics their file.
    absent_files = {"diagnostics.jsonl", "note.json", "rubrics.yaml"}
    assert listed == {path.name for path in finished_record.iterdir()} | absent_files
    transcripts = tmp_path / "transcripts.jsonl"
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    transcripts.write_text(json.dumps({"messages": messages}) + "\n")
    supervised = AstunerJob(algorithm="sft").configure(dict(small))
    supervised.set_data("file", transcripts, validation_path=transcripts)
    logged = {
        name
        for folder in (finished_record, supervised.tune(tmp_path).record)
        for row in read_metrics(folder)
        for name in row.metrics
    }
    explained = {name for row in table("run_record.md", "name") for name in code_spans(row["name"])}
    # The runs have one validation episode for each task, one optimiser step in an update, no filter of type difficulty,
    # no judge with components, no mixture of readers, no teacher, no masked answer, no refill and no stale samples.
    absent = {"workflow/{name}", "val/pass@2", "tasks/too_easy", "tasks/too_hard"}
    absent |= {"distillation/kl", "distillation/calls_without_hint", "time/teacher"}
    absent |= {"correction/{name}/stale_{steps}", "reward/{component}/mean", "judge/{name}", "unscored/{cause}"}
    absent |= {"refill/batches", "refill/tasks", "refill/missing_groups"}
    absent |= {"kl/update", "update/truncated_episodes", "success/rate/{source}", "val/success_rate/{source}"}
    assert explained - absent == logged


def test_example_summary_has_the_fields_of_a_real_one(finished_record: Path, tmp_path: Path):
    (block,) = blocks(GUIDE / "run_record.md", "json")
    (tmp_path / "summary.json").write_text(block.text)
    assert set(read_summary(tmp_path).model_dump()) == set(json.loads((finished_record / "summary.json").read_text()))
    assert json.loads(block.text).keys() == json.loads((finished_record / "summary.json").read_text()).keys()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_layers_match_the_import_contract():
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["name"] == "Imports point down only"]
    shown = "".join(f"{layer.replace('astuner.', '')}\n" for layer in layers)
    assert shown in [block.text for block in blocks(GUIDE / "contributing.md", "text")]


def test_make_targets_and_extras_are_listed():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for row in table("contributing.md", "command") for name in code_spans(row["command"])] == [
        f"make {target}" for target in targets
    ]
    extras = pyproject()["project"]["optional-dependencies"]
    assert {name for row in table("installation.md", "extra") for name in code_spans(row["extra"])} == set(extras)


def test_the_benchmarks_that_make_bench_omits_are_named():
    scripts = {path.name for path in (ROOT / "bench").glob("bench_*.py")} | {"faults"}
    run = set(re.findall(r"bench/(\w+\.py)", (ROOT / "Makefile").read_text()))
    (paragraph,) = [token.content for token in tokens(GUIDE / "performance.md") if "`make bench`" in token.content]
    assert {name for name in code_spans(paragraph) if " " not in name} == scripts - run


def test_benchmarks_page_explains_every_field_of_a_result_file():
    (example,) = [json.loads(block.text) for block in blocks(GUIDE / "benchmarks.md", "json")]
    explained = {name for row in table("benchmarks.md", "field") for name in code_spans(row["field"])}
    fields = BenchResult.model_fields.keys() | SeedResult.model_fields.keys()
    assert example.keys() | example["seeds"][0].keys() | explained == fields
    assert BenchResult.model_validate(example).model_dump().keys() == example.keys()


def test_quick_start_workflow_matches_the_tutorial():
    (shown,) = [block.text for block in blocks(GUIDE / "quickstart.md", "python") if block.file == "workflow.py"]
    tutorial = (ROOT / "tutorial/example_math_agent/math_agent.py").read_text()
    assert tutorial.endswith(shown.partition("\n")[2])
