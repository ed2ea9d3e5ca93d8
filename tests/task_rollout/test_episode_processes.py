"""The processes that an episode starts, in whatever way, end with it, and no others do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from loguru import logger

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Episode, Task
from astuner.system.process_tree import adopt_orphans
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, OnEpisode, TaskRollout
from astuner.task_rollout.statistics import batch_metrics
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tests.task_rollout.process_starts import (
    STARTS,
    Start,
    asyncio_sleep,
    daemon_by_two_forks,
    left,
    pids_in,
    subprocess_popen,
)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Starts(Workflow):
    """Starts processes, then ends as the task's question says."""

    start: ClassVar[Start]
    folder: ClassVar[Path]
    pids: ClassVar[dict[str, list[int]]]

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        folder = self.folder / workflow_task.task_id
        folder.mkdir()
        result = type(self).start(folder)
        if isinstance(result, Awaitable):
            await result
        self.pids[workflow_task.task_id] = pids = await pids_in(folder)
        assert all(map(runs, pids))
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        match workflow_task.task.main_query:
            case "raise":
                raise ValueError("the workflow is broken")
            case "wait":
                await asyncio.sleep(60)
            case "block":
                threading.Event().wait()
            case "be judged":
                return WorkflowOutput()
        return WorkflowOutput(reward=1.0)


class StartingJudge(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        folder = Starts.folder / "judge"
        folder.mkdir()
        subprocess_popen(folder)
        Starts.pids["judge"] = asyncio.run(pids_in(folder))
        return 1.0, True


@pytest.fixture
def rollout(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Episode]]]:
    """Return a function that runs an episode for each question."""
    monkeypatch.setattr(Starts, "folder", tmp_path, raising=False)
    monkeypatch.setattr(Starts, "pids", {}, raising=False)
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)

    def run(*questions: str, start: Start, timeout: float = 30.0, on_episode: OnEpisode = id) -> list[Episode]:
        monkeypatch.setattr(Starts, "start", staticmethod(start), raising=False)
        judge = StartingJudge(TaskJudgeConfig())
        codec = ChatCodec(tokenizer, "default")
        runner = TaskRunner(Starts, judge, engine, codec, episode_timeout=timeout, judge_timeout=timeout)
        task_rollout = TaskRollout(EpisodesHere(runner))
        tasks = [Task(f"t{index}", question) for index, question in enumerate(questions)]
        request = BatchRequest(tasks, 1, "train", 0, 0, CallSettings(max_model_len=512))
        try:
            return task_rollout.run(request, on_episode)
        finally:
            task_rollout.close()

    yield run
    for pids in Starts.pids.values():
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)
    for process in left:
        if isinstance(process, subprocess.Popen):
            process.wait()
    left.clear()


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_processes_end_with_their_episode(rollout: Callable[..., list[Episode]], start: Start) -> None:
    (episode,) = rollout("return", start=start)
    pids = Starts.pids["t0"]
    assert pids
    assert not any(map(runs, pids))
    assert episode.status == "ok"
    text = " ".join(episode.ended_processes)
    assert all(f"(pid {pid})" in text for pid in pids)
    assert batch_metrics([episode])["episodes/ended_processes"] == len(episode.ended_processes)


@pytest.mark.parametrize(("question", "kind"), [("raise", "workflow"), ("wait", "timeout"), ("be judged", None)])
def test_processes_end_however_the_episode_ends(
    rollout: Callable[..., list[Episode]], question: str, kind: str | None
) -> None:
    (episode,) = rollout(question, start=subprocess_popen, timeout=2.0)
    assert episode.error_kind == kind
    assert len(Starts.pids) == (2 if question == "be judged" else 1)
    assert not any(runs(pid) for pids in Starts.pids.values() for pid in pids)
    assert len(episode.ended_processes) == len(Starts.pids)


def test_processes_that_the_run_started_are_left(rollout: Callable[..., list[Episode]]) -> None:
    of_the_run = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], env={})]
    adopt_orphans()
    subprocess.run(["setsid", "--fork", "sleep", "599"], check=True)

    def daemons() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if runs(child.pid) and child.cmdline() == ["sleep", "599"]]

    try:
        (episode,) = rollout("return", start=subprocess_popen)
        assert len(episode.ended_processes) == 1
        assert all(process.poll() is None for process in of_the_run)
        assert len(daemons()) == 1
    finally:
        for process in (*of_the_run, *daemons()):
            process.kill()
            process.wait()


def test_ended_processes_are_named_in_the_log(rollout: Callable[..., list[Episode]]) -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="DEBUG")
    try:
        rollout("return", start=asyncio_sleep)
    finally:
        logger.remove(sink)
    (line,) = [line for line in lines if "left" in line]
    assert line.startswith("episode train-000000-t0-0 left 1 process running, which was ended: sleep 600 (pid ")


def test_zombies_of_an_ended_episode_are_reaped(rollout: Callable[..., list[Episode]]) -> None:
    def zombies() -> list[int]:
        return [child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]

    left_by_first: list[int] = []
    for number in range(200):
        rollout("return", start=daemon_by_two_forks)
        (Starts.folder / "t0").rename(Starts.folder / f"earlier{number}")
        left_by_first = left_by_first or Starts.pids["t0"]
        if not set(left_by_first) & set(zombies()):
            break
        time.sleep(0.02)
    assert not set(left_by_first) & set(zombies())
