"""Failures during a run: episodes, disks, signals and unexpected errors."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.backbone.episode_workers import pool
from astuner.run_record import read_episode, read_index, read_metrics, read_summary
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.folder import FolderLock
from tests.launcher.conftest import Command, write_rows

RUN = Path("launcher_record/run")
Course = tuple[list[tuple[int, dict[str, float]]], Counter[tuple[str, int]]]
ONE_STEP = "trainer_common.total_training_steps=1"


@pytest.fixture(autouse=True)
def _release_what_hangs() -> Iterator[None]:
    yield
    for module in [module for name, module in sys.modules.items() if name.endswith("agents")]:
        if isinstance(getattr(module, "released", None), threading.Event):
            module.released.set()


def episodes(split: str = "train") -> list[EpisodeEntry]:
    return [entry for entry in read_index(RUN) if entry.split == split]


WRONG = {
    "Raises": ("workflow", "RuntimeError: the environment [/bold] broke down (at "),
    "HangsAwaiting": ("timeout", "longer than rollout.episode_timeout (5 s)"),
    "HangsBlocking": ("timeout", "and was abandoned; it was at"),
    "SwallowsItsCancellation": ("timeout", "longer than rollout.episode_timeout (5 s)"),
    "ReturnsRubbish": ("workflow", "execute must return a WorkflowOutput, got float"),
    "RewardIsNan": ("workflow", "WorkflowOutput.reward must be a finite number, got nan"),
    "LogsRubbish": ("workflow", "log_metrics['length'] must be a finite number, got 'short'"),
    "Exits": ("workflow", "SystemExit: 3 (at "),
    "InterruptsItself": ("workflow", "KeyboardInterrupt"),
    "CancelsItself": ("workflow", "CancelledError"),
    "AsksTooLong": ("context_length", "leaves no room for an answer within rollout.max_model_len"),
    "AsksNonsense": ("workflow", "message 0 must be a mapping with a role"),
}
"""Agents, and the kind and the reason of the error of their episodes."""
WRONG_JUDGES = {
    "JudgeRaises": ("judge", "judge JudgesAsTheQuestionSays raised ZeroDivisionError: division by zero (at "),
    "JudgeHangs": ("timeout", "judge JudgesAsTheQuestionSays took longer than 2 s"),
    "JudgeHangsAwaiting": ("timeout", "judge JudgesAsTheQuestionSays took longer than 2 s"),
    "JudgeReturnsRubbish": ("judge", "judge JudgesAsTheQuestionSays returned is_success=7"),
    "JudgeExits": ("judge", "judge JudgesAsTheQuestionSays raised"),
}


def failures() -> dict[str, tuple[str, str]]:
    """Return the kind and the text of the error of each failed episode, by the word of its question."""
    failed = [read_episode(RUN / entry.path) for entry in episodes() if entry.status == "failed"]
    assert all(episode.reward is None for episode in failed)
    words = [episode.task.main_query.split()[episode.repeat_index] for episode in failed]
    return {word: (str(each.error_kind), str(each.error)) for word, each in zip(words, failed, strict=True)}


def test_episodes_that_go_wrong_are_counted_and_the_step_completes(
    train: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "_GRACE_SECONDS", 0.0)
    names = list(WRONG)
    tasks = [["Agent", *names[:6], "StrangeMetadata"], ["Agent", *names[6:], "Agent"]]
    write_rows(folder / "train.jsonl", [{"question": " ".join(task), "answer": "1"} for task in tasks])
    ended = train(
        "rollout.agentscope_workflow='agents->GoesAsTheQuestionSays'",
        *("rollout.num_repeat=8", "rollout.max_env_worker=3", "rollout.max_model_len=400", ONE_STEP),
        *("rollout.episode_timeout=5", "task_judge.timeout=2"),
    )
    assert ended.code == 0, ended.out
    assert "Traceback" not in ended.out
    assert "train step 1: 12 of 16 episodes are left out: [" in ended.out
    assert "other errors (" in ended.out
    wrong = failures()
    assert {name: kind for name, (kind, _) in wrong.items()} == {name: kind for name, (kind, _) in WRONG.items()}
    for name, (_, reason) in WRONG.items():
        assert reason in wrong[name][1]
    assert Counter(entry.status for entry in episodes()) == {"ok": 4, "failed": 12}
    assert read_summary(RUN).episodes.failed == 12


def test_a_judge_that_goes_wrong_costs_its_episode_alone(train: Command, folder: Path):
    write_rows(folder / "train.jsonl", [{"question": " ".join(WRONG_JUDGES), "answer": "1"}])
    ended = train(
        "rollout.agentscope_workflow='agents->Unscored'",
        "task_judge.judge_protocol='agents->JudgesAsTheQuestionSays'",
        *("task_judge.timeout=2", "rollout.num_repeat=8", "data.train_batch_size=1", ONE_STEP),
    )
    assert ended.code == 0, ended.out
    assert "5 of 8 episodes are left out: [" in ended.out
    wrong = failures()
    assert {name: kind for name, (kind, _) in wrong.items()} == {name: kind for name, (kind, _) in WRONG_JUDGES.items()}
    for name, (_, reason) in WRONG_JUDGES.items():
        assert wrong[name][1].startswith(reason)
    assert Counter(entry.status for entry in episodes()) == {"ok": 3, "failed": 5}


def test_a_run_whose_every_episode_fails_stops_and_keeps_them(train: Command, folder: Path):
    agent = "rollout.agentscope_workflow='agents->AlwaysRaises'"
    train(agent).says("all 8 episodes failed", "KeyError: 'answer' (at ")
    assert [(entry.status, entry.calls) for entry in episodes()] == [("failed", 1)] * 8
    assert "error" in (RUN / "run.log").read_text().lower()


def test_a_validation_that_fails_later_does_not_end_a_run_that_learns(train: Command, folder: Path):
    ended = train("rollout.agentscope_workflow='agents->FailsInValidation'")
    assert ended.code == 0, ended.out
    assert "val step 2: 1 of 1 episodes are left out: [workflow] RuntimeError: no validation today" in ended.out
    assert read_summary(RUN).steps == 2
    assert (RUN / "model/config.json").exists()


def test_no_signal_stops_with_the_reason_and_keeps_the_weights(train: Command, folder: Path):
    train(
        "rollout.agentscope_workflow='agents->AlwaysEqual'",
        "trainer_common.no_signal_patience=1",
        "trainer_common.stop_on_no_signal=true",
    ).says("1 consecutive steps had no learning signal", "trainer_common.stop_on_no_signal")
    assert read_summary(RUN).steps == 1
    assert (RUN / "model/config.json").exists()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes, as a disk does that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(train: Command, folder: Path):
    largest = (folder / "model/model.safetensors").stat().st_size
    with files_of_at_most(1000):
        train("trainer_common.save_freq=1").says("cannot write the run record at", "ulimit -f")
    # Python keeps the part of the agent's bytecode that it could write, and fails to read it.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    with files_of_at_most(largest - 1000):
        train("trainer_common.save_freq=1").says(
            "the checkpoint could not be written to ", "step_000001: ", "MiB are free"
        )
    assert list((RUN / "checkpoints").iterdir()) == []
    with files_of_at_most(largest + 1000):
        train("trainer_common.save_freq=1").says("the checkpoint could not be written to ", "step_000001: ")
    assert list((RUN / "checkpoints").iterdir()) == []
    assert train("trainer_common.save_freq=1").code == 0
    (RUN / "summary.json").unlink()
    ended = train("trainer_common.save_freq=1")
    assert ended.code == 0
    assert "resuming from the checkpoint of step 2" in ended.out


def test_two_runs_at_once_into_one_folder(train: Command, folder: Path):
    RUN.parent.mkdir()
    lock = FolderLock(RUN)
    try:
        train().says("is being written by a live run", f"process {os.getpid()}", "--exp-dir")
    finally:
        lock.release()
    assert not RUN.exists()


_course_of_a_whole_run: list[Course] = []
"""That of an uninterrupted run, which the first test makes: it is the same in each folder."""


@pytest.mark.parametrize(
    ("where", "name", "code"),
    [
        ("train-000002", "SIGTERM", 143),
        ("val-000001", "SIGHUP", 129),
        ("val-000002", "SIGINT", 130),
    ],
)
def test_a_signal_saves_and_the_same_command_ends_as_if_nothing_had_been(
    train: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, code: int
):
    settings = ("rollout.agentscope_workflow='agents->Signals'", "trainer_common.test_freq=1")
    if not _course_of_a_whole_run:
        uninterrupted = train(*settings, "experiment_name=whole")
        assert uninterrupted.code == 0, uninterrupted.out
        _course_of_a_whole_run.append(_course(RUN.with_name("whole")))
    monkeypatch.setenv("SIGNAL_AT", where)
    monkeypatch.setenv("SIGNAL", name)
    stopped = train(*settings)
    assert stopped.code == code, stopped.out
    step = 2 if where == "val-000002" else 1
    assert f"interrupted: saving step {step}" in stopped.out
    assert f"run the same command again to resume from the checkpoint of step {step}" in stopped.out
    assert "Traceback" not in stopped.out
    assert "interrupted" in (RUN / "run.log").read_text()
    monkeypatch.setenv("SIGNAL_AT", "never")
    if name == "SIGTERM":
        state = RUN / "checkpoints/step_000001/trainer.pt"
        content = state.read_bytes()
        state.write_bytes(content[:1000])
        train(*settings).says("step_000001 cannot be read", "remove that folder", "trainer_common.resume: false")
        state.write_bytes(content)
    resumed = train(*settings)
    assert resumed.code == 0, resumed.out
    assert f"resuming from the checkpoint of step {step}" in resumed.out
    assert [_course(RUN)] == _course_of_a_whole_run


def _course(folder: Path) -> Course:
    """Metrics in their order, and the number of episodes of each split and step."""
    kept = ("reward/mean", "loss/policy", "val/reward", "val/episodes")
    rows = [(row.step, {k: round(v, 6) for k, v in row.metrics.items() if k in kept}) for row in read_metrics(folder)]
    return rows, Counter((entry.split, entry.step) for entry in read_index(folder))


def test_ctrl_c_in_an_update_lets_the_step_end(train: Command, folder: Path):
    def interrupt(module: Any, *_: object) -> None:
        in_an_update = threading.current_thread() is threading.main_thread() and torch.is_grad_enabled()
        if in_an_update and len(list(read_metrics(RUN))) == 1:
            for _ in range(5):  # as impatient people do
                signal.raise_signal(signal.SIGINT)

    hook = torch.nn.modules.module.register_module_forward_hook(interrupt)
    try:
        stopped = train("trainer_common.total_training_steps=3")
    finally:
        hook.remove()
    assert stopped.code == 130, stopped.out
    assert [row.step for row in read_metrics(RUN)] == [1, 2]
    assert "interrupted: saving step 2" in stopped.out
    resumed = train("trainer_common.total_training_steps=3")
    assert "resuming from the checkpoint of step 2" in resumed.out
    assert read_summary(RUN).steps == 3


def test_ctrl_c_before_the_first_step(train: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIGNAL_AT", "train-000001")
    monkeypatch.setenv("SIGNAL", "SIGINT")
    stopped = train("rollout.agentscope_workflow='agents->Signals'")
    assert stopped.code == 130
    assert "no step was finished, so there is nothing to resume" in stopped.out


def test_an_unexpected_error_is_one_message_and_a_traceback_in_the_log(
    train: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(module: Any, *_: object) -> None:
        raise ArithmeticError("two and two is five")

    hook = torch.nn.modules.module.register_module_forward_hook(fail)
    try:
        ended = train()
    finally:
        hook.remove()
    assert ended.code == 1
    assert "Traceback" not in ended.out
    assert "internal error: ArithmeticError: two and two is five (at " in ended.out
    assert f"its traceback is in {folder / RUN / 'run.log'}" in ended.out
    log = (RUN / "run.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "two and two is five" in log


def test_an_unexpected_error_before_there_is_a_record(astuner: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("astuner.config.loading.load_config", lambda *_: 1 // 0)
    monkeypatch.setenv("OPENAI_API_KEY", "abcdefgh12345")
    ended = astuner("--conf", "run.yaml")
    assert ended.code == 1
    assert "internal error: ZeroDivisionError" in ended.out
    (kept,) = folder.glob("astuner-*.log")
    assert str(kept) in ended.out
    assert "Traceback" in kept.read_text()


def test_an_interrupt_that_a_library_turns_into_its_error(astuner: Command, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            raise AttributeError("'NoneType' object has no attribute 'flags'") from None

    monkeypatch.setattr("astuner.config.loading.load_config", interrupted)
    ended = astuner("--conf", "run.yaml")
    assert (ended.code, ended.out.splitlines()[1:]) == (130, ["interrupted"])  # after "reading run.yaml"


def test_a_library_that_replaces_the_interrupt_does_not_change_the_exit_code(
    astuner: Command, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as ray.get does

    monkeypatch.setattr("astuner.config.loading.load_config", interrupted)
    ended = astuner("--conf", "run.yaml")
    assert (ended.code, ended.out.split()[-1]) == (143, "interrupted")


def test_memory_that_is_not_enough_is_named(train: Command, folder: Path):
    def exhaust(module: Any, *_: object) -> None:
        torch.empty(10**15)

    hook = torch.nn.modules.module.register_module_forward_hook(exhaust)
    try:
        train().says("out of memory", "trainer_common.max_tokens_per_micro_batch")
    finally:
        hook.remove()
