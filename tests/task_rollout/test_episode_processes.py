"""The processes that an episode starts, in whatever way, end with it, and no others do."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
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

Start = Callable[[Path], object]
"""Starts processes that write their ids to `{folder}/{id}.pid`."""

SLEEPER = 'import os, sys, time; open(f"{sys.argv[1]}/{os.getpid()}.pid", "w").close(); time.sleep(600)'
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
SHELL = 'echo > "$0/$$.pid"; exec sleep 600'


left: list[object] = []
"""Objects whose end would be a warning that their process still runs."""


def sleeper(folder: Path, code: str = SLEEPER) -> list[str]:
    return [sys.executable, "-c", code, str(folder)]


def sleep_here(folder: Path) -> None:
    (folder / f"{os.getpid()}.pid").touch()
    time.sleep(600)


def subprocess_popen(folder: Path) -> None:
    left.append(subprocess.Popen(sleeper(folder)))


def empty_environment(folder: Path) -> None:
    left.append(subprocess.Popen(sleeper(folder), env={}))


def new_session(folder: Path) -> None:
    left.append(subprocess.Popen(sleeper(folder), start_new_session=True))


def ignores_sigterm(folder: Path) -> None:
    left.append(subprocess.Popen(sleeper(folder, STUBBORN)))


def shell_pipeline(folder: Path) -> None:
    pipeline = f"sh -c '{SHELL}' {folder} | sh -c '{SHELL}' {folder} | cat"
    left.append(subprocess.Popen(pipeline, shell=True))


def shell_background(folder: Path) -> None:
    subprocess.run(f"sh -c '{SHELL}' {folder} > /dev/null 2>&1 &", shell=True, check=True)


def os_system(folder: Path) -> None:
    assert os.system(f"sh -c '{SHELL}' {folder} & exit 3") >> 8 == 3


def setsid_daemon(folder: Path) -> None:
    subprocess.run(["setsid", "--fork", *sleeper(folder)], check=True)


def daemon_without_environment(folder: Path) -> None:
    subprocess.run(["env", "-i", "setsid", "--fork", *sleeper(folder)], check=True)


async def asyncio_exec(folder: Path) -> None:
    await asyncio.create_subprocess_exec(*sleeper(folder))


async def asyncio_sleep(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "600")
    (folder / f"{process.pid}.pid").touch()


async def asyncio_shell(folder: Path) -> None:
    await asyncio.create_subprocess_shell(f"sh -c '{SHELL}' {folder}", stdout=asyncio.subprocess.PIPE)


def fork(folder: Path) -> None:
    if os.fork() == 0:
        sleep_here(folder)
        os._exit(0)


def daemon_by_two_forks(folder: Path) -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            sleep_here(folder)
        os._exit(0)
    os.waitpid(child, 0)


def fork_and_exec(folder: Path) -> None:
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.execv(sys.executable, sleeper(folder))
        os._exit(0)
    os.waitpid(child, 0)


def terminal(folder: Path) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(sys.executable, sleeper(folder))
    os.set_inheritable(fd, False)


def posix_spawn(folder: Path) -> None:
    os.posix_spawn(sys.executable, sleeper(folder), dict(os.environ))


def spawnl(folder: Path) -> None:
    os.spawnv(os.P_NOWAIT, sys.executable, sleeper(folder))


def c_library(folder: Path) -> None:
    ctypes.CDLL(None).popen(f"exec sh -c '{SHELL}' {folder}".encode(), b"r")


def multiprocessing_with(method: str) -> Start:
    def start(folder: Path) -> None:
        multiprocessing.get_context(method).Process(target=sleep_here, args=(folder,)).start()

    start.__name__ = f"multiprocessing_{method}"
    return start


def process_pool(folder: Path) -> None:
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    for _ in range(2):
        pool.submit(sleep_here, folder)


def in_a_thread(folder: Path) -> None:
    thread = threading.Thread(target=subprocess_popen, args=(folder,))
    thread.start()
    thread.join()


async def in_the_default_executor(folder: Path) -> None:
    await asyncio.get_running_loop().run_in_executor(None, subprocess_popen, folder)


async def in_to_thread(folder: Path) -> None:
    await asyncio.to_thread(subprocess_popen, folder)


async def in_a_task(folder: Path) -> None:
    await asyncio.create_task(asyncio_exec(folder))


async def tree(folder: Path) -> None:
    code = f"import subprocess, sys; subprocess.Popen({sleeper(folder)!r}); " + SLEEPER
    await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(folder))


async def stopped(folder: Path) -> None:
    process = subprocess.Popen(sleeper(folder))
    left.append(process)
    await pids_in(folder)
    process.send_signal(signal.SIGSTOP)


STARTS: list[Start] = [
    subprocess_popen,
    empty_environment,
    new_session,
    ignores_sigterm,
    shell_pipeline,
    shell_background,
    os_system,
    setsid_daemon,
    daemon_without_environment,
    asyncio_exec,
    asyncio_shell,
    fork,
    daemon_by_two_forks,
    fork_and_exec,
    terminal,
    posix_spawn,
    spawnl,
    c_library,
    *map(multiprocessing_with, ("fork", "spawn", "forkserver")),
    process_pool,
    in_a_thread,
    in_the_default_executor,
    in_to_thread,
    in_a_task,
    tree,
    stopped,
]


async def pids_in(folder: Path, count: int = 1) -> list[int]:
    """Return the ids of at least `count` processes that wrote theirs to `folder`."""
    for _ in range(3000):
        pids = [int(path.stem) for path in folder.glob("*.pid")]
        if len(pids) >= count:
            return pids
        await asyncio.sleep(0.01)
    raise TimeoutError(f"only {len(pids)} processes started")


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
