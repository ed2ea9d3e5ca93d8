"""No process of an episode outlives its run, however the run ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from astuner.run_record import read_episode, read_index
from tests.launcher.liveness import lives, wait_for
from tests.preloaded import AstunerProcess

AGENT = """
import asyncio, os, sys, time
from pathlib import Path
from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class LeavesProcesses(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        name = workflow_task.episode_id

        def start(kind, *prefix, **options):
            code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            code += f"open(f'{os.getcwd()}/{name}-{kind}-{{os.getpid()}}.pid', 'w').close(); time.sleep(600)"
            return asyncio.create_subprocess_exec(*prefix, sys.executable, "-c", code, **options)

        await start("child")
        await start("daemon", "setsid", "--fork")
        await start("bare", "env", "-i", "setsid", "--fork")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open(f"{name}-fork-{os.getpid()}.pid", "w").close()
                time.sleep(600)
            os._exit(0)
        while len(list(Path().glob(f"{name}-*.pid"))) < 4:
            await asyncio.sleep(0.05)
        if workflow_task.repeat_index == 0 and Path("fail").exists():
            raise ValueError("with running processes")
        await asyncio.sleep(600 if workflow_task.repeat_index == 0 else 1)
        return WorkflowOutput(reward=float(workflow_task.repeat_index))


class ReturnsAtOnce(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        code += "open(f'{os.getcwd()}/child-{os.getpid()}.pid', 'w').close(); time.sleep(600)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        while not Path(f"child-{process.pid}.pid").exists():
            await asyncio.sleep(0.01)
        return WorkflowOutput(reward=1.0)
"""
RUN = ("--conf", "run.yaml", "astuner.rollout.agentscope_workflow='leaves->LeavesProcesses'")
ONE_TASK = ("astuner.data.train_batch_size=1", "astuner.debug.debug_first_n_tasks=1")
TWO_EPISODES = (*ONE_TASK, "astuner.rollout.num_repeat=2")


@pytest.fixture(autouse=True)
def _agent(folder: Path) -> None:
    (folder / "leaves.py").write_text(AGENT)


def started() -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in Path().glob("*.pid")]


def _are_old(files: Iterable[Path]) -> bool:
    """Return whether there are files, and the last one was written two seconds ago."""
    times = [file.stat().st_mtime for file in files]
    return len(times) >= 4 and time.time() - max(times) > 2


@contextmanager
def running(*arguments: str) -> Iterator[AstunerProcess]:
    """Yield a run in a separate process, once each of its episodes has started its four processes."""
    with Path("out.txt").open("wb") as out:
        run = AstunerProcess(*RUN, *TWO_EPISODES, *arguments, cwd=Path.cwd(), output=out)
    try:
        wait_for(lambda: _are_old(Path().glob("*-0-*.pid")) or run.poll() is not None)
        assert run.poll() is None, Path("out.txt").read_text()
        assert any(map(lives, started()))
        yield run
    finally:
        run.kill()
        run.wait()
        for pid in filter(lives, started()):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("backbone", ["local", "debug"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_outlives_an_interrupted_run(backbone: str, number: signal.Signals) -> None:
    with running(f"--backbone={backbone}") as run:
        run.send_signal(number)
        run.wait(60)
        wait_for(lambda: not any(map(lives, started())), 30)


@pytest.mark.parametrize("parallel", [1, 2])
def test_no_process_outlives_a_run_interrupted_while_it_ends_the_processes_of_an_episode(parallel: int) -> None:
    """The processes ignore SIGTERM, so that the run waits before it kills them."""
    command = (*RUN[:2], "--backbone=debug", f"astuner.debug.debug_max_parallel={parallel}")
    with Path("out.txt").open("wb") as out:
        workflow = "astuner.rollout.agentscope_workflow='leaves->ReturnsAtOnce'"
        run = AstunerProcess(*command, workflow, cwd=Path.cwd(), output=out)
    try:
        wait_for(lambda: bool(started()) or run.poll() is not None)
        time.sleep(0.2)  # until the episode has returned
        assert run.poll() is None, Path("out.txt").read_text()
        run.send_signal(signal.SIGTERM)
        run.wait(60)
        assert not any(map(lives, started()))
    finally:
        run.kill()
        run.wait()
        for pid in filter(lives, started()):
            os.kill(pid, signal.SIGKILL)


def test_a_finished_run_names_what_it_ended() -> None:
    Path("fail").touch()
    with Path("out.txt").open("wb") as out:  # its own process, because a process prints the warning once
        run = AstunerProcess(*RUN, *TWO_EPISODES, "--backbone=debug", cwd=Path.cwd(), output=out)
    assert run.wait(300) == 0, Path("out.txt").read_text()
    assert not any(map(lives, started()))
    record = Path("launcher_record/run-debug")
    entries = read_index(record)
    assert sorted(entry.status for entry in entries) == ["failed", "ok"]
    log = (record / "run.log").read_text()
    ended_by = {entry.episode_id: read_episode(record / entry.path).ended_processes for entry in entries}
    for episode_id, processes in ended_by.items():
        assert len(processes) >= 3  # a daemon without environment may count for an episode that ran at the same time
        assert f"episode {episode_id} left " in log
    assert "processes running, which were ended: " in Path("out.txt").read_text()
