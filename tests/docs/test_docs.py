"""The documentation is true: what it shows is run, where it points exists, what it lists is complete.

A page is a script. Its blocks are taken in order, in a folder of its own: a block that begins with a comment with a
file's name is written to that file, Python is executed (the blocks of a page share their names), and every `astuner`
command is run, unless `.ci/run` runs that very command. Runs are made `small`, and are real otherwise.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from astuner import AstunerJob, Workflow
from astuner.backbone.algorithms import ALGORITHMS, NO_CLIP
from astuner.cli import astuner as command
from astuner.config.data import TaskJudgeConfig
from astuner.config.loading import load_config
from astuner.config.services import BUILT_IN_SERVICES, ServiceConfig
from astuner.llm_engine.scripted import ScriptedEngine
from astuner.model_tuner import CallSettings, ChatCodec
from astuner.run_record import read_metrics, read_summary
from astuner.schema import Task, WorkflowTask
from astuner.task_judge.math_answer_as_judge import MathAnswerAsJudge
from astuner.task_runner import TaskRunner

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/en"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *GUIDE.glob("*.md"), *(ROOT / "tutorial").glob("**/README.md")]
)
NEEDS_A_RECORD = ("run_record.md", "how_it_works.md", "viewer.md")
"""Pages about `launcher_record/math_agent`, the run of the quick start."""

BASE = {"astuner": {"model": {"path": "some/model"}, "rollout": {"agentscope_workflow": "module->Class"}}}
"""What a fragment of YAML is merged onto."""

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
        """The file that the block is, where its first line names one."""
        found = _FILE_NAME.fullmatch(self.text.partition("\n")[0])
        return found[1] if found else None

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of each `astuner` command in it."""
        lines = re.split(r"\n|&&", self.text.replace("\\\n", " "))
        words = [shlex.split(line, comments=True) for line in lines]
        return [line[1:] for line in words if line[:1] == ["astuner"]]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str = "") -> list[Block]:
    found = [token for token in tokens(page) if token.type == "fence" and language in ("", token.info.strip())]
    return [Block(page, token.map[0] + 1, token.info.strip(), token.content) for token in found if token.map]


def all_blocks(language: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for page in PAGES for block in blocks(page, language)]


def every_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@cache
def commands_of_ci() -> list[list[str]]:
    """The `astuner` commands of `.ci/run`, its variables filled in, without where it puts records."""
    text = (ROOT / ".ci/run").read_text()
    (main_yaml,) = re.findall(r"^main_yaml=(\S+)$", text, re.MULTILINE)
    text = (
        text.replace(' --exp-dir "$records"', "")
        .replace('"$main_yaml"', main_yaml)
        .replace("$records", "launcher_record")
    )
    return Block(ROOT / ".ci/run", 1, "bash", text).commands


class Playground:
    """Runs pages in the present folder."""

    def __init__(self, small: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
        self._overrides = [f"astuner.{key}={value}" for key, value in small.items()]
        tune = AstunerJob.tune
        # A page's job runs as it stands there, only smaller.
        monkeypatch.setattr(AstunerJob, "tune", lambda job, *args: tune(job.configure(dict(small)), *args))

    def run(self, page: Path) -> dict[str, Any]:
        """Run a page and return the names that its Python defined."""
        names: dict[str, Any] = {"__name__": "page"}
        for block in blocks(page):
            if block.file is not None:
                Path(block.file).write_text(block.text)
            if block.language == "python" and block.file is not None:
                names.update(vars(importlib.import_module(Path(block.file).stem)))
            elif block.language == "python":
                # Compiled with the page's name and line, which a traceback then shows.
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            elif block.language == "bash":
                for arguments in block.commands:
                    self.astuner(arguments)
        return names

    def astuner(self, arguments: list[str]) -> None:
        if arguments in commands_of_ci() or arguments[0] in ("view", "serve-tinker"):  # they serve until Ctrl-C
            return
        overrides = self._overrides if "--conf" in arguments else []
        if "--model" in arguments:  # of an earlier command
            assert Path(arguments[arguments.index("--model") + 1]).is_dir()
        assert command.main([*arguments, *overrides], standalone_mode=False) in (None, 0)


@pytest.fixture
def playground(small: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    (tmp_path / "tutorial").symlink_to(ROOT / "tutorial")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield Playground(small, monkeypatch)
    # Pages have files of one name.
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def a_record(small: Mapping[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a finished run with all that a record can have."""
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
    return folder / "math_agent"


@every_page()
def test_what_a_page_shows_runs(page: Path, playground: Playground, tokenizer: Any, request: pytest.FixtureRequest):
    if page.name in NEEDS_A_RECORD:
        Path("launcher_record").mkdir()
        Path("launcher_record/math_agent").symlink_to(request.getfixturevalue("a_record"))
    if page.name == "serve_tinker.md":
        request.getfixturevalue("a_tinker_server")
    names = playground.run(page)
    for workflow in names.values():
        if isinstance(workflow, type) and issubclass(workflow, Workflow) and workflow is not Workflow:
            assert_it_scores(workflow, ChatCodec(tokenizer))


def assert_it_scores(workflow: type[Workflow], codec: ChatCodec) -> None:
    """A model that always gives the right answer gets a reward."""
    answer = codec.tokenizer.encode("\\boxed{4}<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: answer, max_model_len=8192)
    runner = TaskRunner(workflow, MathAnswerAsJudge(TaskJudgeConfig()), engine, codec)
    task = WorkflowTask(Task("1", "What is 2 + 2?", metadata={"answer": "4"}), "page-1")
    settings = CallSettings(max_model_len=8192, max_prompt_length=8192, max_response_length=8192)
    episode = asyncio.run(runner.run(task, runner.tuner(task, settings)))
    assert episode.status == "ok", episode.error


@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_yaml_loads(block: Block, tmp_path: Path):
    for other in blocks(block.page, "yaml"):
        if other.file is not None:
            (tmp_path / other.file).write_text(other.text)
    fragment = tmp_path / "fragment.yaml"
    fragment.write_text(yaml.safe_dump(_merged(BASE, yaml.safe_load(block.text)), sort_keys=False))
    load_config(fragment)


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


@pytest.mark.parametrize("block", all_blocks("bash"))
def test_commands_parse(block: Block):
    for arguments in block.commands:
        if arguments[0] in ("--help", "--version"):
            continue
        name, *rest = arguments if arguments[0] in command.commands else ["train", *arguments]
        params = command.commands[name].make_context(name, rest).params
        if "conf" not in params:
            continue
        conf = params["conf"]
        made_on_the_page = {other.file for other in blocks(block.page)}
        if any(["init"] in other.commands for other in blocks(block.page, "bash")):
            made_on_the_page.add("agent.yaml")
        assert (ROOT / conf).is_file() or str(conf) in made_on_the_page


@every_page()
def test_links_lead_somewhere(page: Path):
    for target in links(page):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs.get("href") or child.attrs.get("src"))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found = tokens(page)
    titles = [found[i + 1].content for i, token in enumerate(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page()
def test_no_page_names_a_place_on_somebodys_machine(page: Path):
    assert not _MACHINE_PATH.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("block", all_blocks("json"))
def test_json_parses(block: Block):
    json.loads(block.text)


def table(page: str, first_cell: str) -> list[dict[str, str]]:
    """The rows of the table whose header begins with `first_cell`, by column."""
    for header, *rows in tables(GUIDE / page):
        if header[0] == first_cell:
            return [dict(zip(header, row, strict=True)) for row in rows]
    raise AssertionError(f"{page} has no table that begins with {first_cell}")


def tables(page: Path) -> Iterator[list[list[str]]]:
    """The cells of each table, row by row."""
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


def coded(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_table_of_algorithms_is_the_registry():
    rows = {row["`adv_estimator`"].strip("`"): row for row in table("algorithms.md", "`adv_estimator`")}
    assert set(rows) == set(ALGORITHMS)
    for name, algorithm in ALGORITHMS.items():
        row, rule = rows[name], algorithm.rule
        assert row["`loss_agg_mode`"] == f"`{algorithm.loss_agg_mode}`"
        (number,) = re.findall(r"\[([\d.]+)\]", row["paper"])
        assert number in algorithm.citation
        norm, low, high = (row[f"`{key}`"] for key in ("norm_adv_by_std", "clip_ratio_low", "clip_ratio_high"))
        assert norm == ("–" if rule is None else str(rule.norm_adv_by_std).lower())
        if rule is None or rule.clip == NO_CLIP:
            assert (low, high) == ("–", "–")
        else:
            assert (float(low), float(high)) == (rule.clip.low, rule.clip.high)


def test_the_page_on_serve_tinker_lists_every_option():
    params = {param.opts[0]: param for param in command.commands["serve-tinker"].params}
    rows = {
        name: row["default"].strip("`") for row in table("serve_tinker.md", "option") for name in coded(row["option"])
    }
    assert rows.keys() == params.keys()
    assert rows == {name: str(param.default) if not param.required else "–" for name, param in params.items()}


def test_the_page_on_services_lists_every_key_and_built_in():
    config = {**ServiceConfig(command="x").model_dump(mode="json", exclude={"command"}), "command": ""}
    health = config.pop("health")
    expected = config | {f"health.{key}": value for key, value in health.items()}
    shown = {row["key"].strip("`"): row["default"].strip("`") for row in table("services.md", "key")}
    assert shown == {key: value if value == "" else json.dumps(value) for key, value in expected.items()}
    options = {name for row in table("services.md", "option") for name in coded(row["option"])}
    assert options == {f"--with-{name}" for name in BUILT_IN_SERVICES}


def test_the_page_on_the_run_record_names_every_file_and_metric(
    a_record: Path, small: Mapping[str, object], tmp_path: Path
):
    listed = {name.strip("/") for row in table("run_record.md", "file") for name in coded(row["file"])}
    assert listed == {path.name for path in a_record.iterdir()}
    transcripts = tmp_path / "transcripts.jsonl"
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    transcripts.write_text(json.dumps({"messages": messages}) + "\n")
    supervised = AstunerJob(algorithm="sft").configure(dict(small))
    supervised.set_data("file", transcripts, validation_path=transcripts)
    logged = {
        name
        for folder in (a_record, supervised.tune(tmp_path).record)
        for row in read_metrics(folder)
        for name in row.metrics
    }
    explained = {name for row in table("run_record.md", "name") for name in coded(row["name"])}
    assert explained - {"workflow/{name}", "val/pass@2"} == logged


def test_the_summary_that_is_shown_has_the_form_of_a_real_one(a_record: Path, tmp_path: Path):
    (block,) = blocks(GUIDE / "run_record.md", "json")
    (tmp_path / "summary.json").write_text(block.text)
    assert set(read_summary(tmp_path).model_dump()) == set(json.loads((a_record / "summary.json").read_text()))
    assert json.loads(block.text).keys() == json.loads((a_record / "summary.json").read_text()).keys()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_layers_are_those_of_the_import_contract():
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    shown = "".join(f"{layer.replace('astuner.', '')}\n" for layer in layers)
    assert shown in [block.text for block in blocks(GUIDE / "contributing.md", "text")]


def test_make_targets_and_extras_are_listed():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for row in table("contributing.md", "command") for name in coded(row["command"])] == [
        f"make {target}" for target in targets
    ]
    extras = pyproject()["project"]["optional-dependencies"]
    assert {name for row in table("installation.md", "extra") for name in coded(row["extra"])} == set(extras)


def test_the_workflow_of_the_quick_start_is_the_tutorials():
    (shown,) = [block.text for block in blocks(GUIDE / "quickstart.md", "python") if block.file == "workflow.py"]
    tutorial = (ROOT / "tutorial/example_math_agent/math_agent.py").read_text()
    assert tutorial.endswith(shown.partition("\n")[2])
