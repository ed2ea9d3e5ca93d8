"""Ways in which an episode starts processes."""

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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

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
