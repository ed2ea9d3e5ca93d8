from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from astuner.errors import ConfigError, RecordError
from astuner.run_record import read_episode, read_index, read_metrics, read_summary
from astuner.run_record.folder import current_environment
from astuner.run_record.plots import plot_run
from astuner.run_record.record import RunRecord
from astuner.run_record.summary import RunSummary
from astuner.schema import Episode, LlmCall, Task, TokenCounts

MakeEpisode = Callable[..., Episode]


def open_record(folder: Path, **arguments: Any) -> RunRecord:
    values: dict[str, Any] = {"backbone": "local", "config_yaml": "astuner: {}\n", "resume": False, "loggers": ()}
    return RunRecord.open(folder, **{**values, **arguments})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_writes_all_files(tmp_path: Path, make_episode: MakeEpisode) -> None:
    folder = tmp_path / "launcher_record" / "exp"
    with open_record(folder, loggers=("console", "tensorboard")) as record:
        assert record.folder == folder
        logger.debug("a remark")
        record.log_metrics(1, {"reward/mean": 0.5})
        record.write_episode(1, "train", make_episode(), advantage=0.5, tokens=TokenCounts(3, 2, 1))
        record.write_summary(RunSummary(backbone="local", seed=1, steps=1, seconds=2.0))
        plot_run(folder)
    files = {name.split("/events.out")[0] for name in files_of(folder)}
    assert files == {
        "config.yaml", "environment.json", "run.log", "metrics.jsonl", "tensorboard", "episodes/index.jsonl",
        "episodes/train/step_000001/t1-0-8b5cc4df7e.json", "summary.json", "plots/reward.png",
    }  # fmt: skip
    assert (folder / "config.yaml").read_text() == "astuner: {}\n"
    assert "test_run_record:" in (folder / "run.log").read_text()
    assert "step 1 · reward/mean 0.5" in (folder / "run.log").read_text()
    assert read_index(folder)[0].advantage == 0.5
    assert read_summary(folder).steps == 1


def test_several_threads_can_write_at_once(
    tmp_path: Path, make_episode: MakeEpisode, tensorboard_events: Callable[[Path], dict[str, Any]]
) -> None:
    folder = tmp_path / "exp"
    with open_record(folder, loggers=("tensorboard",)) as record, ThreadPoolExecutor(8) as pool:
        for number in range(200):
            pool.submit(record.write_episode, number % 3, "train", make_episode(f"e{number}", tokens=50))
            pool.submit(record.log_metrics, number, {"reward/mean": 1.0})
    assert {read_episode(folder / entry.path).episode_id for entry in read_index(folder)} == {
        f"e{number}" for number in range(200)
    }
    assert sorted(row.step for row in read_metrics(folder)) == list(range(200))
    assert sorted(step for step, _ in tensorboard_events(folder)["reward/mean"]) == list(range(200))


def test_environment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["astuner", "--conf", "x.yaml", "--api-key", "hunter2"])
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for kind, person in (("AUTHOR", "a"), ("COMMITTER", "c")):
        monkeypatch.setenv(f"GIT_{kind}_NAME", person)
        monkeypatch.setenv(f"GIT_{kind}_EMAIL", f"{person}@x")
    (tmp_path / "code.py").write_text("1")
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-q", "-m", "one", "--no-gpg-sign"]):
        subprocess.run(["git", *command], check=True, capture_output=True)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    open_record(tmp_path / "record" / "one").close()
    (tmp_path / "code.py").write_text("2")
    open_record(tmp_path / "record" / "two").close()
    clean, dirty = (
        json.loads((tmp_path / "record" / name / "environment.json").read_bytes()) for name in ("one", "two")
    )
    assert clean["git"] == {"revision": revision, "dirty": False}
    assert dirty["git"] == {"revision": revision, "dirty": True}
    assert clean["argv"] == ["astuner", "--conf", "x.yaml", "--api-key", "[redacted]"]
    assert clean["backbone"] == "local"
    assert clean["python"] == ".".join(map(str, sys.version_info[:3]))
    assert clean["packages"]["pydantic"]
    assert "no-such-package" not in clean["packages"]


@pytest.mark.parametrize("package", ["datasketch", "gguf", "gymnasium", "minigrid", "reasoning-gym", "textarena"])
def test_packages_that_generate_or_choose_tasks_are_recorded(package: str) -> None:
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    assert current_environment()["packages"][package] == installed


def test_the_processor_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "cpuinfo"
    monkeypatch.setattr("astuner.run_record.folder._CPUINFO", information)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert current_environment()["processor"] is None
    for text, name in (
        ("processor\t: 0\nmodel name\t: Intel(R) Xeon(R): 8 cores\nmodel name\t: other\n", "Intel(R) Xeon(R): 8 cores"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", None),  # ARM has no name
    ):
        information.write_text(text)
        assert current_environment()["processor"] == name


def test_outside_a_repository_git_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    open_record(tmp_path / "exp").close()
    assert json.loads((tmp_path / "exp" / "environment.json").read_bytes())["git"] is None


def test_new_runs_rename_the_folders_of_earlier_runs(tmp_path: Path, make_episode: MakeEpisode) -> None:
    folder = tmp_path / "exp"
    contents = []
    for number in range(3):
        with open_record(folder) as record:
            record.log_metrics(1, {"reward/mean": number})
            record.write_episode(1, "train", make_episode())
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "weights").write_text(str(number))
        contents.append(files_of(folder))
    assert [files_of(tmp_path / name) for name in ("exp.1", "exp.2", "exp")] == contents
    assert f"moved the earlier run of exp to {tmp_path / 'exp.2'}" in (folder / "run.log").read_text()


def test_run_in_a_linked_folder_is_renamed_behind_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "exp")
    (tmp_path / "disk" / "exp").mkdir()
    for yaml in ("one", "two"):
        open_record(tmp_path / "link", config_yaml=yaml).close()
    configs = {name: (tmp_path / "disk" / name / "config.yaml").read_text() for name in ("exp", "exp.1")}
    assert configs == {"exp": "two", "exp.1": "one"}
    assert (tmp_path / "link").is_symlink()


def test_resumed_run_keeps_earlier_steps_and_removes_later_ones(
    tmp_path: Path, make_episode: MakeEpisode, tensorboard_events: Callable[[Path], dict[str, Any]]
) -> None:
    folder = tmp_path / "exp"
    with open_record(folder, loggers=("tensorboard",)) as record:
        for step in (1, 2, 3):
            record.log_metrics(step, {"reward/mean": step})
            record.write_episode(step, "train", make_episode(f"first-{step}"))
    with open_record(folder, resume=True, loggers=("tensorboard",)) as record:
        record.truncate_after(2)
        for step in (3, 4):
            record.log_metrics(step, {"reward/mean": 10 * step})
            record.write_episode(step, "train", make_episode(f"second-{step}"))
    assert [(row.step, row.metrics["reward/mean"]) for row in read_metrics(folder)] == [
        (1, 1),
        (2, 2),
        (3, 30),
        (4, 40),
    ]
    assert tensorboard_events(folder)["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    entries = read_index(folder)
    assert [entry.episode_id for entry in entries] == ["first-1", "first-2", "second-3", "second-4"]
    assert len(list((folder / "episodes").rglob("step_*/*.json"))) == 4
    assert all(read_episode(folder / entry.path).episode_id == entry.episode_id for entry in entries)
    assert not (tmp_path / "exp.1").exists()
    assert "resumed after step 2: removed 1 metrics lines and 1 episodes" in (folder / "run.log").read_text()


KILLED = """
import sys
from pathlib import Path
from loguru import logger
from astuner.run_record.record import RunRecord
from astuner.schema import Episode, LlmCall, Task
logger.remove()
record = RunRecord.open(Path(sys.argv[1]), backbone="local", config_yaml="", resume=False)
calls = tuple(LlmCall(str(n), "e", tuple(range(500)), tuple(range(500)), (-0.5,) * 500, "stop") for n in range(4))
for step in range(1, 1_000_000):
    record.log_metrics(step, {f"metric/{number}": step for number in range(50)})
    record.write_episode(step, "train", Episode(f"e{step}", Task("t", "q"), 0, "ok", 1.0, True, calls))
    print(step, flush=True)
"""


def test_killed_run_is_resumed_without_torn_or_duplicate_entries(tmp_path: Path, make_episode: MakeEpisode) -> None:
    folder = tmp_path / "exp"
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        for line in run.stdout:
            if int(line) >= 30:
                run.kill()
                break
    run.wait()
    done = 25
    with open_record(folder, resume=True, loggers=("tensorboard",)) as record:
        record.truncate_after(done)
        record.log_metrics(done + 1, {"metric/0": -1.0})
        record.write_episode(done + 1, "train", make_episode("after"))
    assert [row.step for row in read_metrics(folder)] == list(range(1, done + 2))
    entries = read_index(folder)
    assert [entry.step for entry in entries] == list(range(1, done + 2))
    assert {read_episode(folder / entry.path).episode_id for entry in entries} == {
        entry.episode_id for entry in entries
    }
    assert len([path for path in (folder / "episodes").rglob("*") if path.is_file()]) == done + 2


def test_resumed_run_with_other_settings_keeps_the_earlier_files(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    for yaml in ("lr: 1\n", "lr: 1\n", "lr: 2\n", "lr: 3\n"):
        open_record(folder, config_yaml=yaml, resume=True).close()
    assert {name: content for name, content in files_of(folder).items() if name.startswith("config")} == {
        "config.yaml": b"lr: 3\n", "config.1.yaml": b"lr: 1\n", "config.2.yaml": b"lr: 2\n",
    }  # fmt: skip
    assert not (folder / "environment.1.json").exists()


def test_folder_without_a_record_is_an_error_and_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all my work")
    (tmp_path / "environment.json").write_text('{"mine": 1}')
    before = files_of(tmp_path)
    for resume in (False, True):
        with pytest.raises(RecordError, match="holds files, but no run record"):
            open_record(tmp_path, resume=resume)
    assert files_of(tmp_path) == before


def test_folder_with_a_partial_first_file_is_usable(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / ".environment.json.123-456.tmp").write_text("{")
    open_record(tmp_path / "exp").close()
    assert not list((tmp_path / "exp").glob(".*"))


def test_two_live_runs_never_share_a_folder(tmp_path: Path) -> None:
    with open_record(tmp_path / "exp"):
        before = files_of(tmp_path)
        for resume in (False, True):
            with pytest.raises(RecordError, match=rf"live run \(process {os.getpid()}\)"):
                open_record(tmp_path / "exp", resume=resume)
        assert files_of(tmp_path) == before
    open_record(tmp_path / "exp").close()


def test_a_failed_open_releases_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="pip install wandb"):
        open_record(tmp_path / "exp", loggers=("wandb",))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "foreign").write_text("")
    with pytest.raises(RecordError):
        open_record(tmp_path / "exp")
    (tmp_path / "exp" / "foreign").unlink()
    open_record(tmp_path / "exp").close()


def test_closing_ends_logging_and_can_be_repeated(tmp_path: Path) -> None:
    record = open_record(tmp_path / "exp")
    record.close()
    record.close()
    logger.info("too late")
    assert "too late" not in (tmp_path / "exp" / "run.log").read_text()


def test_missing_rights_are_a_clear_error(
    tmp_path: Path, without_rights: Callable[[], AbstractContextManager[None]]
) -> None:
    tmp_path.chmod(0o555)
    try:
        with without_rights(), pytest.raises(RecordError, match=r"cannot write the run record at .*Permission denied"):
            open_record(tmp_path / "exp")
    finally:
        tmp_path.chmod(0o755)


DISK_FULL = """
import resource, sys
from pathlib import Path
from loguru import logger
from astuner.errors import RecordError
from astuner.run_record.record import RunRecord
from astuner.schema import Episode, LlmCall, Task
logger.remove()
with RunRecord.open(Path(sys.argv[1]), backbone="local", config_yaml="", resume=False) as record:
    record.log_metrics(1, {"reward/mean": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    calls = (LlmCall("c", "e", tuple(range(999)), (), (), "stop"),)
    actions = [
        lambda: record.write_episode(1, "train", Episode("e", Task("t", "q"), 0, "ok", 1.0, True, calls)),
        lambda: [record.log_metrics(step, {"reward/mean": 1.0, "loss/kl": 1.0}) for step in range(2, 99)],
        lambda: [logger.info("x" * 900) for _ in range(9)],
    ]
    for action in actions:
        try:
            action()
        except RecordError as error:
            print(error)
"""


def test_full_disk_is_a_clear_error_without_tracebacks(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DISK_FULL, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    episode, metrics = done.stdout.splitlines()
    assert f"{folder}/episodes/train/step_000001/t-0-" in episode
    assert "metrics.jsonl: File too large" in metrics or "tensorboard: File too large" in metrics
    assert done.stderr.splitlines() == [
        "astuner: cannot write the log ([Errno 27] File too large); later records may be missing from it"
    ]
    assert [row.step for row in read_metrics(folder)][:2] == [1, 2]
    assert read_index(folder) == []


def raise_with(secret: str) -> None:
    raise ValueError(f"refused key {secret}")


def test_no_secret_reaches_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["sk-first-0001", "sk-second-0002", 'Pa55 word/with+odd"chars\\', "hf_onlyInText0123456789"]
    monkeypatch.setenv("DASHSCOPE_API_KEY", f"{secrets[0]}|{secrets[1]}")
    monkeypatch.setenv("DB_PASSWORD", secrets[2])
    everything = " ".join(secrets)
    monkeypatch.setattr(sys, "argv", ["astuner", f"x={everything}", "--password", "lonely-word"])
    folder = tmp_path / "exp"
    message = {"role": "user", "content": everything, everything: [{"deep": (everything, secrets)}]}
    call = LlmCall("c", "e", (1,), (2,), (-0.5,), "stop", messages=(message,), agent_name=everything)
    task = Task(everything, everything, (message,), {everything: everything})
    episode = Episode(
        everything, task, 0, "failed", None, None, (call,), error_kind=secrets[0], error=everything, metadata=message
    )
    with open_record(folder, config_yaml=f"key: {everything}\n", loggers=("console", "tensorboard")) as record:
        try:
            raise_with(everything)
        except ValueError:
            logger.exception("failed with {}", everything)
            logger.opt(exception=True).bind(extra=everything).error("{!r}", message)
        record.log_metrics(1, {f"metric/{everything}": 1.0, "reward/mean": float("nan"), everything: float("nan")})
        record.write_episode(1, "train", episode)
        record.write_episode(1, "train", replace(episode, episode_id="other"))
        record.write_summary(RunSummary(backbone="local", seed=1, steps=1, seconds=1.0, model=everything))
        plot_run(folder)
    written = files_of(tmp_path)
    log = written["exp/run.log"].decode()
    assert "ValueError: refused key [redacted]" in log
    assert "Traceback (most recent call last)" in log
    forms = [form for secret in secrets for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1])]
    leaks = [
        (name, form)
        for name, content in written.items()
        for form in [*forms, "lonely-word", "first-0001", "second-0002", "onlyInText"]
        if form.encode() in content or form in name
    ]
    assert leaks == []
    assert len(read_index(folder)) == 2
