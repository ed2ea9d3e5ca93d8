"""The processes that an episode starts, in whatever way, end with it, and no others do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from loguru import logger

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.llm_engine.scripted import ScriptedEngine
from astuner.model_tuner import CallSettings, ChatCodec, ModelTuner
from astuner.schema import Episode, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout import BatchRequest, OnEpisode, TaskRollout
from astuner.task_rollout import pool as pool_module
from astuner.task_rollout.statistics import batch_metrics
from astuner.task_runner import TaskRunner
from tests.task_rollout.process_starts import (
    STARTS,
    Start,
    asyncio_shell,
    asyncio_sleep,
    c_library,
    daemon_by_two_forks,
    daemon_without_environment,
    left,
    pids_in,
    setsid_daemon,
    sleeper,
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

    def run(
        *questions: str, start: Start, inline: bool = False, timeout: float = 30.0, on_episode: OnEpisode = id
    ) -> list[Episode]:
        monkeypatch.setattr(Starts, "start", staticmethod(start), raising=False)
        judge = StartingJudge(TaskJudgeConfig())
        codec = ChatCodec(tokenizer, "default")
        runner = TaskRunner(Starts, judge, engine, codec, episode_timeout=timeout, judge_timeout=timeout)
        task_rollout = TaskRollout(runner, 8, in_main_thread=inline)
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
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "main thread"])
def test_processes_end_with_their_episode(rollout: Callable[..., list[Episode]], start: Start, inline: bool) -> None:
    if inline and start is c_library:
        pytest.skip("the main thread also has the orphans that the process adopts")
    (episode,) = rollout("return", start=start, inline=inline)
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


def test_an_episode_that_blocks_its_thread_leaves_no_process(
    rollout: Callable[..., list[Episode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_GRACE_SECONDS", 0.1)
    released = threading.Event()

    async def wait_for_child(folder: Path) -> None:
        process = subprocess.Popen(sleeper(folder))
        Starts.pids["blocked"] = await pids_in(folder)
        process.wait()
        # The thread of the ended episode goes on, but starts no further process.
        with pytest.raises(ProcessLookupError, match=r"train-000000-t0-0 has ended"):
            subprocess.run(["true"], check=True)
        if (child := os.fork()) == 0:
            time.sleep(600)
        os.waitpid(child, 0)
        released.set()

    (episode,) = rollout("return", start=wait_for_child, timeout=1.0)
    assert episode.error_kind == "timeout"
    assert f"(pid {Starts.pids['blocked'][0]})" in " ".join(episode.ended_processes)
    assert not any(map(runs, Starts.pids["blocked"]))
    assert released.wait(30)


def test_episodes_that_run_together_keep_their_processes(rollout: Callable[..., list[Episode]]) -> None:
    """The processes of one episode live until its own end, those of the run for as long as the run wants."""
    others_ended = threading.Event()
    in_turn = threading.Lock()
    checked: list[bool] = []
    of_the_run = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], env={})]
    subprocess.run(["setsid", "--fork", "sleep", "599"], check=True)

    def daemons() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if runs(child.pid) and child.cmdline() == ["sleep", "599"]]

    async def start(folder: Path) -> None:
        if folder.name == "t0":
            for start_one in (subprocess_popen, setsid_daemon, daemon_without_environment, daemon_by_two_forks):
                with in_turn:
                    start_one(folder)
            pids = await pids_in(folder, 4)
            while not others_ended.is_set():
                await asyncio.sleep(0.01)
            checked.append(all(map(runs, pids)))
        else:
            with in_turn:
                (subprocess_popen if folder.name == "t1" else daemon_without_environment)(folder)

    def on_episode(episode: Episode) -> None:
        ended.append(episode)
        if len(ended) == 2:
            others_ended.set()

    ended: list[Episode] = []
    try:
        rollout("return", "return", "return", start=start, on_episode=on_episode)
        assert checked == [True]
        assert all(process.poll() is None for process in of_the_run)
        assert len(daemons()) == 1  # adopted by this process, and alive
    finally:
        for process in (*of_the_run, *daemons()):
            process.kill()
            process.wait()
    assert not any(runs(pid) for pids in Starts.pids.values() for pid in pids)
    by_task = {episode.task.task_id: len(episode.ended_processes) for episode in ended}
    assert sum(by_task.values()) == 6
    assert by_task["t1"] == 1


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


def test_a_thread_pool_of_the_run_is_not_part_of_the_episode_that_used_it_first(
    rollout: Callable[..., list[Episode]],
) -> None:
    with ThreadPoolExecutor(1) as shared:

        async def start(folder: Path) -> None:
            await asyncio.get_running_loop().run_in_executor(shared, subprocess_popen, folder)

        for _ in range(2):
            (episode,) = rollout("return", start=start)
            assert len(episode.ended_processes) == 1
            (Starts.folder / "t0").rename(Starts.folder / f"earlier{len(list(Starts.folder.iterdir()))}")
        process = shared.submit(subprocess.Popen, ["sleep", "600"]).result()
        rollout("return", start=asyncio_shell)
        assert process.poll() is None
        process.kill()
        process.wait()
