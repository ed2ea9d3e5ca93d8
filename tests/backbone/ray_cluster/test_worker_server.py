"""The server that forks Ray's workers. Scripts of these tests are in the place of Ray's `default_worker.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from astuner.backbone.ray_cluster.worker_server import can_fork_workers, worker_server
from tests.env_service.services import has_ended, wait_until

pytestmark = pytest.mark.skipif(not can_fork_workers("cpu"), reason="workers are forked on Linux only")

REPORT = """
import json, os, sys
is_imported = "wave" in sys.modules
print(json.dumps([sys.argv, os.getcwd(), os.environ["COLOR"], sys.path[:2], is_imported, os.getsid(0) == os.getpid()]))
print("to the error output", file=sys.stderr)
raise SystemExit(3)
"""
SLEEP = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
# A main process that is killed while a worker runs.
KILLED = """
import os, signal, subprocess, sys, time
from astuner.backbone.ray_cluster.worker_server import worker_server
with worker_server(["wave"], {}) as server:
    command = f"exec {server.executable} {sys.argv[1]} {sys.argv[2]}"
    worker = subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(server.executable, flush=True)
    while not os.path.exists(sys.argv[2]) or not open(sys.argv[2]).read():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def started(
    executable: str, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Start a worker as Ray does: through a shell that is replaced by the client."""
    command = " ".join(map(str, ("exec", executable, *words)))
    return subprocess.Popen(
        ["bash", "-c", command], env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def script(folder: Path, text: str) -> Path:
    path = folder / "worker.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("modules", [["wave"], ["no_such_module"]])
def test_a_worker_runs_as_in_a_new_interpreter_and_shares_imported_modules_if_they_can_be_imported(
    tmp_path: Path, modules: list[str], log: list[str]
):
    path = script(tmp_path, REPORT)
    env = {**os.environ, "COLOR": "blue", "PYTHONPATH": "/one/path"}
    with worker_server(modules, {"COLOR": "red"}) as server:
        worker = started(server.executable, path, "a", "'b c'", env=env, cwd=tmp_path)
        output, errors = worker.communicate(timeout=300)
    forked = modules == ["wave"]
    assert forked or ["No module named 'no_such_module'" in message for message in log] == [True]
    assert json.loads(output) == [
        [str(path), "a", "b c"],
        str(tmp_path),
        "blue",
        [str(tmp_path), "/one/path"],
        forked,
        forked,
    ]
    assert errors == "to the error output\n"
    assert worker.returncode == 3


def test_an_exception_is_printed_and_ends_the_worker_with_1(tmp_path: Path):
    path = script(tmp_path, "raise ValueError('from the worker')")
    with worker_server([], {}) as server:
        worker = started(server.executable, path)
        _, errors = worker.communicate(timeout=300)
    assert errors.endswith("ValueError: from the worker\n")
    assert worker.returncode == 1


def connected(executable: str) -> socket.socket:
    """Connect to the server as a client does."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(executable.rsplit(maxsplit=1)[-1])
    return client


def send(client: socket.socket, request: dict[str, object], cut: int | None = None) -> None:
    text = json.dumps(request).encode()
    socket.send_fds(client, [len(text).to_bytes(4, "big")], [0, 1, 2])
    client.sendall(text[:cut])


def test_a_stopped_client_does_not_block_the_others(tmp_path: Path):
    path = script(tmp_path, REPORT)
    with (
        worker_server(["wave"], {}) as server,
        connected(server.executable) as silent,
        connected(server.executable) as cut,
    ):
        send(cut, {"argv": ["a"] * 1000}, cut=100)
        worker = started(server.executable, path, env={**os.environ, "COLOR": "blue"})
        output, _ = worker.communicate(timeout=300)
        assert json.loads(output)[-1], "the worker was not forked"
        # The clients become ordinary workers.
        assert cut.recv(1) == silent.recv(1) == b""


def test_failed_requests_leave_no_open_files(tmp_path: Path):
    request = {"argv": [str(script(tmp_path, "raise SystemExit(4)"))], "env": {}, "cwd": str(tmp_path)}
    with worker_server([], {}) as server:

        def open_files() -> list[str]:
            with connected(server.executable) as client:
                send(client, request)
                assert [client.recv(1) for _ in range(3)] == [b"f", b"\x04", b""]
            return os.listdir(f"/proc/{server._process.pid}/fd")

        before = len(open_files())
        for _ in range(3):
            with connected(server.executable) as client:
                send(client, request, cut=10)
        assert len(open_files()) == before


def test_a_worker_that_cannot_start_ends(tmp_path: Path):
    path = script(tmp_path, "raise SystemExit(4)")
    request = {"argv": [str(path)], "env": {"COLOR": "\0"}, "cwd": str(tmp_path)}
    with worker_server([], {}) as server:
        with connected(server.executable) as client:
            send(client, request)
            assert client.recv(1) + client.recv(1) == b"f\x01"
        worker = started(server.executable, path)
        worker.communicate(timeout=300)
        assert worker.returncode == 4


def test_workers_have_different_random_numbers(tmp_path: Path):
    path = script(tmp_path, "import numpy, random; print(random.random(), numpy.random.random())")
    with worker_server(["numpy", "random"], {}) as server:
        workers = [started(server.executable, path) for _ in range(2)]
        numbers = {number for worker in workers for number in worker.communicate(timeout=300)[0].split()}
    assert len(numbers) == 4


def test_the_client_ends_when_its_worker_is_killed_and_the_others_end_with_the_server(tmp_path: Path):
    path, files = script(tmp_path, SLEEP), [tmp_path / "first", tmp_path / "second"]
    with worker_server(["wave"], {}) as server:
        first, second = (started(server.executable, path, file) for file in files)
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        os.kill(int(files[0].read_text()), signal.SIGKILL)
        first.communicate(timeout=300)
        assert first.returncode
        assert not has_ended(int(files[1].read_text()))
    second.communicate(timeout=300)
    assert second.returncode
    assert has_ended(int(files[1].read_text()))


def test_workers_and_folder_end_with_a_killed_main_process(tmp_path: Path):
    path, file = script(tmp_path, SLEEP), tmp_path / "pid"
    main = subprocess.run(
        (sys.executable, "-c", KILLED, path, file), check=False, capture_output=True, text=True, timeout=300
    )
    assert main.returncode == -signal.SIGKILL, main.stderr
    worker, folder = int(file.read_text()), Path(main.stdout.split()[-1]).parent
    wait_until(lambda: has_ended(worker) and not folder.exists())
