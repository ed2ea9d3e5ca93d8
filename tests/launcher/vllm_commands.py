"""Runs the `astuner` command in subprocesses, and inspects the vLLM servers that it starts."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.launcher.liveness import lives, wait_for
from tests.preloaded import AstunerProcess


@dataclass(frozen=True)
class Server:
    """The resources of a running server.

    Attributes:
        pids: process ids of the guard and the server's processes.
        memory: files in /dev/shm.
        tmp: temporary folder.
        port: port.
    """

    pids: list[int]
    memory: set[Path]
    tmp: Path
    port: int

    @classmethod
    def under(cls, guard: psutil.Process, port: int) -> Server:
        pids = [process.pid for process in (guard, *guard.children(recursive=True))]
        tmp = Path(guard.children()[0].environ()["TMPDIR"])
        return cls(pids, {path for pid in pids for path in shared_memory(pid)}, tmp, port)

    def assert_lives(self) -> None:
        assert len(self.pids) >= 3
        assert self.memory
        assert all(path.exists() for path in (*self.memory, self.tmp))

    def assert_gone(self) -> None:
        assert [pid for pid in self.pids if lives(pid)] == []
        assert [path for path in (*self.memory, self.tmp) if path.exists()] == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0


def shared_memory(pid: int) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped, except for deleted ones."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


@dataclass
class Commands:
    """Runs `astuner` in subprocesses, and inspects their servers."""

    folder: Path
    port: int
    env: dict[str, str]
    started: list[AstunerProcess] = field(default_factory=list)

    def start(self, *arguments: str) -> AstunerProcess:
        with (self.folder / "out.txt").open("w") as out:
            run = AstunerProcess(*arguments, cwd=self.folder, env=self.env, output=out)
        self.started.append(run)
        return run

    def debug(self, *settings: str, episodes: int = 2) -> AstunerProcess:
        """Start a debug run of 1 task with 2 episodes, or of 2 tasks with 4 each."""
        numbers = {2: (1, 2), 8: (2, 4)}[episodes]
        words = [f"astuner.debug.debug_vllm_port={self.port}", "astuner.rollout.name=vllm"]
        words += [f"astuner.debug.debug_first_n_tasks={numbers[0]}", f"astuner.rollout.num_repeat={numbers[1]}"]
        return self.start("--conf", "run.yaml", "--backbone=debug", *words, *settings)

    def wait(self, run: AstunerProcess) -> tuple[int, str]:
        code = run.wait(400)
        return code, (self.folder / "out.txt").read_text()

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text()

    def guards(self) -> list[psutil.Process]:
        """Return the guards of servers on the port."""
        port = str(self.port)
        return [
            process
            for process in psutil.process_iter()
            if lives(process.pid)
            and "astuner.processes.guard" in _words(process)
            and any(port in _words(child) for child in process.children())
        ]

    def server(self) -> Server:
        (guard,) = self.guards()
        return Server.under(guard, self.port)

    def server_of(self, run: AstunerProcess, sign: str = "vllm: ready after") -> Server:
        """Return the server of a run once `sign` is in its output; the run must not have ended."""
        wait_for(lambda: sign in self.output or run.poll() is not None)
        assert run.poll() is None, self.output
        return self.server()

    def state_file(self) -> Path:
        return Path(self.env["XDG_CACHE_HOME"]) / f"astuner/engines/{self.port}.json"


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
