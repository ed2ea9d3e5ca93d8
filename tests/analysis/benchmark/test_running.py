"""`astuner bench SUITE.yaml`: real runs of a tiny model in processes of their own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from astuner import AstunerJob
from astuner.analysis.benchmark import running
from astuner.analysis.benchmark.results import outdated_versions, read_results, result_of, write_result
from astuner.analysis.benchmark.running import BenchRun, plan_runs
from astuner.analysis.benchmark.suite import load_suite
from astuner.cli.main import astuner as command
from astuner.errors import ConfigError, InstallError, RecordError
from astuner.installer.env_dir import EnvDir, InstallManifest
from astuner.installer.reexec import missing_packages
from astuner.run_record import read_summary
from astuner.run_record.folder import FolderLock, current_environment, is_being_written
from tests.preloaded import PythonProcess, interpreter

AGENTS = Path(__file__).parents[2] / "backbone/local/agents.py"
PATIENCE = 600.0


@pytest.fixture(autouse=True)
def runs_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(running, "_COMMAND", (*interpreter(), "-m", "astuner"))


@pytest.fixture
def suite(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of two entries, `letters` and one whose model does not exist, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_files(model_folder)


def write_files(model_folder: Path) -> Path:
    """Write the suite and its files to the working directory."""
    rows = [{"question": f"question {number}", "answer": ""} for number in range(4)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model__renderer": "qwen3",
        "data__train_batch_size": 2,
        "rollout__num_repeat": 2,
        "rollout__max_response_length_in_one_turn": 4,
        "rollout__max_model_len": 256,
        "rollout__compute_madness_checklist": [],
        "trainer_common__total_training_steps": 2,
        "trainer_common__save_freq": 1,
        "trainer_common__test_freq": 1,
        "trainer_common__val_before_train": True,
        "trainer_common__val_pass_n": 1,
    }
    job = AstunerJob(algorithm="grpo", model=model_folder, **values)
    # A copy: the tests' own file would stay imported as `agents`.
    shutil.copy(AGENTS, "agents.py")
    job.set_workflow(f"{Path('agents.py').absolute()}->Letters")
    job.set_data("file", "tasks.jsonl", validation_path="tasks.jsonl").dump_job_as_yaml(Path("letters.yaml"))
    missing = "astuner.model.path=a/model/that/does/not/exist"
    entries = [
        {"name": "letters", "conf": "letters.yaml", "seeds": 2},
        {"name": "broken", "conf": "letters.yaml", "seeds": [7], "overrides": [missing]},
    ]
    Path("suite.yaml").write_text(yaml.safe_dump({"entries": entries}))
    return Path("suite.yaml")


@pytest.fixture(scope="module")
def project(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a suite, with the record of a finished run of `letters` in `finished`."""
    folder = tmp_path_factory.mktemp("project")
    with contextlib.chdir(folder):
        (run,) = plan_runs(load_suite(write_files(model_folder)), Path("finished"), seeds=1, entries=["letters"])
        assert run.start() == "new"
        command.main(run.arguments, standalone_mode=False)
        assert run.start() == "kept"
    return folder


@pytest.fixture
def finished(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchRun:
    """That run, in the working directory of the suite, with a copy of the record."""
    monkeypatch.chdir(project)
    (run,) = plan_runs(load_suite(Path("suite.yaml")), tmp_path / "out", seeds=1, entries=["letters"])
    shutil.copytree(Path("finished") / run.name, run.folder)
    return run


def bench(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, ["bench", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_runs_are_recorded_a_failure_ends_no_other_run_and_finished_runs_are_kept(suite: Path):
    code, text = bench("suite.yaml", "--jobs", "3", "--output", "out")
    assert code == 1
    assert "[3/3]" in text
    (failure,) = [line for line in text.splitlines() if line.startswith("broken-local-seed7 failed: ")]
    assert failure.startswith("broken-local-seed7 failed: exit code 1, error: ")
    assert "a/model/that/does/not/exist" in failure
    assert failure.endswith("; its output is in out/broken-local-seed7.log")
    assert "a/model/that/does/not/exist" in Path("out/broken-local-seed7.log").read_text()
    (result,) = read_results(Path("out/results"))
    assert (result.name, [seed.seed for seed in result.seeds]) == ("letters-local", [1, 2])
    for seed in result.seeds:
        summary = read_summary(Path(f"out/letters-local-seed{seed.seed}"))
        assert summary.seed == seed.seed
        before, after = summary.validation.before, summary.validation.after
        assert before is not None
        assert after is not None
        assert (seed.before, seed.after, seed.episodes) == (before.success_rate, after.success_rate, 4)
        assert (seed.tokens, seed.steps, [step for step, _ in seed.curve]) == (summary.tokens, 2, [0, 1, 2])
    assert result.versions["astuner"] == "0.1.0"
    assert result.versions.get("processor") == current_environment()["processor"]
    assert result.date == f"{datetime.now(UTC):%Y-%m-%d}"
    assert result.command == "astuner --conf letters.yaml --backbone local astuner.trainer_common.seed=SEED"
    assert {path.name for path in Path("out/plots").iterdir()} == {"letters-local.png", "gains.png"}
    page = Path("out/results.md").read_text()
    assert f"| 2 | {result.seeds[1].before:.1%} | {result.seeds[1].after:.1%} |" in page
    assert "](plots/letters-local.png)" in page
    assert "](plots/gains.png)" in page
    files = {path: path.stat().st_mtime_ns for path in Path("out/letters-local-seed1").rglob("*") if path.is_file()}

    code, text = bench("suite.yaml", "--output", "out", "--entry", "letters")
    assert code == 0
    assert text.count("finished earlier, kept") == 2
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert read_results(Path("out/results")) == [result]

    _, text = bench("suite.yaml", "--output", "out", "--entry", "letters", "--seeds", "1")
    assert "letters-local.json no longer has the seeds 2, which have no finished run in this command" in text

    # The page keeps the results of earlier calls. A result without a finished run is not kept.
    old = result.model_copy(update={"suite": "broken"})
    write_result(Path("out/results"), old)
    write_result(Path("out/results"), result.model_copy(update={"suite": "earlier"}))
    code, text = bench("suite.yaml", "--output", "out", "--entry", "broken")
    assert code == 1
    assert "out/results/broken-local.json is deleted, because no run of broken-local finished" in text
    assert [each.suite for each in read_results(Path("out/results"))] == ["earlier", "letters"]
    bench("suite.yaml", "--output", "out", "--entry", "letters")
    assert "[earlier](#earlier-on-local)" in Path("out/results.md").read_text()


def test_unfinished_and_changed_runs_are_recognised(finished: BenchRun):
    run, suite = finished, load_suite(Path("suite.yaml"))
    assert run.start() == "kept"
    temperature = "astuner.rollout.temperature=0.7"
    (changed,) = plan_runs(suite, run.records, seeds=1, entries=["letters"], overrides=[temperature])
    assert changed.start() == "restarted"
    # A run that was resumed with another torch.
    environment = json.loads((run.folder / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (run.folder / "environment.1.json").write_text(json.dumps(environment))
    result = result_of(run.entry, "local", {run.seed: run.folder})
    assert result is not None
    assert result.versions["torch"] == ["1.0", metadata.version("torch")]
    (run.folder / "summary.json").unlink()
    assert run.start() == "resumed"
    assert changed.start() == "restarted"
    for checkpoint in (run.folder / "checkpoints").iterdir():
        checkpoint.rename(run.folder / checkpoint.name)
    assert run.start() == "restarted"


def test_runs_of_other_versions_are_named_and_start_again_on_request(finished: BenchRun, log: list[str]):
    run = finished
    words = ("suite.yaml", "--output", str(run.records), "--entry", "letters", "--seeds", "1")
    bench(*words)
    assert run.start(rerun_outdated=True) == "kept"
    assert not [line for line in log if "other versions" in line]
    file = run.folder / "environment.json"
    environment = json.loads(file.read_text())
    environment["git"], environment["cpus"] = {"revision": "f" * 40, "dirty": False}, 1000
    environment["packages"] |= {"torch": "1.0", "verl": "3"}
    file.write_text(json.dumps(environment))
    log.clear()
    code, text = bench(*words)
    assert (code, "finished earlier, kept" in text) == (0, True)
    torch = metadata.version("torch")
    assert log == [
        "letters-local-seed1: recorded with other versions than a run that starts now: revision ffffffffffff → "
        f"absent, torch 1.0 → {torch}, verl 3 → absent; --rerun-outdated starts such runs again"
    ]
    (run.folder / "summary.json").unlink()
    assert (run.start(), run.start(rerun_outdated=True)) == ("resumed", "outdated")
    code, text = bench(*words, "--rerun-outdated")
    assert "starts again, because its record has other versions" in text
    assert code == 0
    assert json.loads(file.read_text())["packages"]["torch"] == torch
    assert json.loads((run.folder.with_name(f"{run.name}.1") / "environment.json").read_text()) == environment
    assert (run.start(), run.start(rerun_outdated=True)) == ("kept", "kept")


def test_versions_of_a_backbone_in_its_own_environment_are_those_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ASTUNER_ENVIRONMENTS", str(tmp_path / "environments"))
    monkeypatch.setattr("astuner.analysis.benchmark.results.missing_packages", lambda backbone: ["verl"])
    record = tmp_path / "record"
    record.mkdir()
    packages = {"torch": "2.0", "verl": "0.9"}
    (record / "environment.json").write_text(json.dumps({"python": "3.12.1", "packages": packages}))
    assert outdated_versions(record, "verl") == []  # the environment is not installed
    env_dir = EnvDir.of("verl")
    env_dir.mark_incomplete()
    manifest = InstallManifest(
        spec="verl", digest="", source="", editable=False, version="", python="3.12.1", extra=(), extra_digest="",
        seconds=0, size=0,
    )  # fmt: skip
    env_dir.write_manifest(manifest)
    for name, version in (packages | {"torch": "2.1"}).items():
        folder = env_dir.folder / f"lib/python3.12/site-packages/{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert outdated_versions(record, "verl") == ["torch 2.0 → 2.1"]


def names(runs: list[BenchRun]) -> list[str]:
    return [run.name for run in runs]


def test_options_select_runs(suite: Path, write_suite: Callable[..., Path], log: list[str]):
    loaded = load_suite(
        write_suite(
            {"name": "one", "conf": "letters.yaml", "backbones": ["local", "verl"], "seeds": [3, 9]},
            {"name": "two", "conf": "letters.yaml", "seeds": 1, "seed_key": "astuner.trainer_common.shuffle_seed"},
        )
    )
    one = ["one-local-seed3", "one-local-seed9", "one-verl-seed3", "one-verl-seed9"]
    assert names(plan_runs(loaded, Path("out"))) == [*one, "two-local-seed1"]
    # An entry without backbones runs on those of the command line.
    assert names(plan_runs(loaded, Path("out"), backbones=["verl", "trinity"])) == [
        *one[2:], "two-verl-seed1", "two-trinity-seed1"
    ]  # fmt: skip
    assert log == ["the entry one is not run on trinity: its `backbones` in the suite are local, verl"]
    assert names(plan_runs(loaded, Path("out"), seeds=2, backbones=["local"], entries=["one"])) == [
        "one-local-seed1",
        "one-local-seed2",
    ]
    run = plan_runs(loaded, Path("out"), entries=["two"], overrides=["astuner.rollout.temperature=1.0"])[0]
    assert run.overrides[1:] == ("astuner.rollout.temperature=1.0", "astuner.trainer_common.shuffle_seed=1")
    with pytest.raises(ConfigError, match="has no entry 'three'; its entries are one, two"):
        plan_runs(loaded, Path("out"), entries=["three"])
    with pytest.raises(ConfigError, match="no chosen entry runs on trinity"):
        plan_runs(loaded, Path("out"), backbones=["trinity"], entries=["one"])
    for override, option in (
        ("astuner.experiment_name=x", "`name` of the entry"),
        ("+astuner.backbone=debug", "--backbones"),
        ("astuner.trainer_common.shuffle_seed=3", "--seeds"),
    ):
        with pytest.raises(ConfigError, match=f"differs between the runs of `astuner bench`; use {option}"):
            plan_runs(loaded, Path("out"), overrides=[override])


@pytest.fixture
def write_suite() -> Callable[..., Path]:
    def write(*entries: object) -> Path:
        Path("other.yaml").write_text(yaml.safe_dump({"entries": list(entries)}))
        return Path("other.yaml")

    return write


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "entries: expected one or more$"),
        ([{"name": "a", "conf": "letters.yaml", "seeds": [1, 2, 1]}], "entries.0.seeds: the seeds 1 are repeated"),
        ([{"name": "a", "conf": "letters.yaml", "seeds": "3"}], "entries.0.seeds: '3'; expected a list$"),
        ([{"name": "a", "conf": "letters.yaml", "seeds": 10**9}], "1000000000 is not a number of seeds; expected 1 to"),
        ([{"name": "a", "conf": "letters.yaml", "seeds": [-1]}], r"seeds.0: -1; expected greater than or equal to 0$"),
        ([{"name": "a", "conf": "0/0.toml"}], r"there is no file 0/0.toml, neither here .*; the path starts from"),
        ([{"name": "a", "conf": "leters.yaml"}], r"there is no file leters.yaml.*; did you mean letters.yaml\?$"),
        ([{"name": "a", "conf": "letters.yaml", "seed": 3}], "entries.0.seed: unknown key; did you mean 'seeds'"),
        ([{"name": "a", "conf": "letters.yaml", "x": 3}], "entries.0.x: unknown key; the keys are name, conf, over"),
        ([{"name": "a"}], "entries.0.conf: this key is missing$"),
        ([{"name": "a", "conf": "letters.yaml", "seeds": 0}], "entries.0.seeds: 0 is not a number of seeds"),
        ([{"name": "a b", "conf": "letters.yaml"}], "entries.0.name: 'a b' does not match "),
        ([{"name": "a", "conf": "letters.yaml", "backbones": ["debug"]}], "'debug' is not a backbone that trains"),
        ([{"name": "a", "conf": "letters.yaml", "overrides": ["x"]}], "'x' is not of the form KEY=VALUE"),
        ([{"name": "a", "conf": "letters.yaml"}] * 2, "several entries have the name 'a'"),
    ],
)
def test_errors_of_a_suite_name_the_place(
    suite: Path, write_suite: Callable[..., Path], entries: list[object], message: str
):
    with pytest.raises(ConfigError, match=message):
        load_suite(write_suite(*entries))


def test_a_configuration_without_a_first_validation_is_refused_before_any_run(suite: Path):
    with pytest.raises(ConfigError, match="'letters' of the suite does not validate the starting model"):
        bench("suite.yaml", "--output", "out", "--set", "astuner.trainer_common.val_before_train=False")
    assert not Path("out").exists()


def test_a_backbone_without_its_environment_is_refused_before_any_run(suite: Path):
    if not missing_packages("verl"):
        pytest.skip("this environment has verl")
    with pytest.raises(InstallError, match=r"letters-verl-seed1 cannot run: backbone 'verl' .* run: astuner install"):
        bench("suite.yaml", "--output", "out", "--entry", "letters", "--backbones", "local,verl")
    assert not Path("out").exists()


def test_a_configuration_without_validation_tasks_is_refused_before_any_run(suite: Path):
    with pytest.raises(ConfigError, match="'letters' of the suite has no validation tasks; set them under"):
        bench("suite.yaml", "--output", "out", "--set", "astuner.task_reader.dataset_file.validation.file_path=''")
    assert not Path("out").exists()


def test_a_folder_in_which_another_process_runs_a_suite_is_refused(suite: Path):
    lock = FolderLock(Path("out"))
    try:
        with pytest.raises(RecordError, match=r"out is being written .* choose another folder with --output"):
            bench("suite.yaml", "--output", "out")
    finally:
        lock.release()
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ("--backbones", "local,debug"),
            "'debug' is not a backbone that trains; expected some of local, verl, trinity",
        ),
        (("--seeds", "1001"), "1001 is not a number of seeds; expected 1 to 1000"),
    ],
)
def test_usage_errors(suite: Path, option: tuple[str, str], message: str):
    result = CliRunner().invoke(command, ["bench", "suite.yaml", *option])
    assert result.exit_code == 2
    assert message in result.output


BENCH = """
import json, sys
from astuner.analysis.benchmark import running
from astuner.cli.main import main
running._COMMAND = tuple(json.loads(sys.argv.pop(1)))
main()
"""


def test_an_interrupt_ends_the_runs_and_they_continue_later(suite: Path, tmp_path: Path):
    """The command in a process, ended by Ctrl-C while its run trains."""
    steps = "astuner.trainer_common.total_training_steps=100000"
    (run,) = plan_runs(load_suite(suite), Path("out"), seeds=1, entries=["letters"], overrides=[steps])
    words = ["bench", "suite.yaml", "--entry", "letters", "--seeds", "1", "--set", steps, "--output", "out"]
    with Path("bench.log").open("ab") as log:
        process = PythonProcess("-c", BENCH, json.dumps(running._COMMAND), *words, cwd=tmp_path, stdout=log)
    try:
        until = time.monotonic() + PATIENCE
        while not list((run.folder / "checkpoints").glob("step_*/complete.json")):
            assert process.poll() is None, Path("bench.log").read_text()
            assert time.monotonic() < until, run.log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
    assert "interrupted; run the same command again to continue" in Path("bench.log").read_text()
    assert not is_being_written(run.folder)
    assert not (run.folder / "summary.json").exists()
    assert run.start() == "resumed"


def test_the_suite_of_the_published_results_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    suite = load_suite(Path("tutorial/benchmark.yaml"))
    runs = plan_runs(suite, tmp_path, seeds=1)
    assert {run.backbone for run in runs} == {"local", "verl", "trinity"}
    assert {run.start() for run in runs} == {"new"}
    assert all(len(entry.seeds) == 5 for entry in suite.entries)
