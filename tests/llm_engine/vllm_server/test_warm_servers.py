"""State files of warm servers are checked against the running processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.errors import ServiceError
from astuner.llm_engine.vllm_server.settings import VllmSettings
from astuner.llm_engine.vllm_server.warm_servers import (
    PortLock,
    ProcessId,
    WarmServer,
    engines_folder,
    log_file,
    stop_warm_servers,
    warm_ports,
    warm_server,
)
from astuner.processes.guarded_process import GuardedProcess

PORT = 18123
SETTINGS = VllmSettings(
    model="a/model",
    weights="",
    port=PORT,
    seed=1,
    dtype="float32",
    tensor_parallel_size=1,
    max_model_len=10,
    max_num_seqs=1,
    logprobs_mode="raw_logprobs",
    gpu_memory_utilization=None,
    kv_cache_bytes=1,
    device="cpu",
    gpus=None,
    vllm="0.28.0",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def server() -> Iterator[WarmServer]:
    """Start a process with the server's name in its command line, and write its state file."""
    argv = [sys.executable, "-c", "import time; time.sleep(600)", SETTINGS.name]
    with log_file(PORT).open("wb") as output:
        process = GuardedProcess(argv, Path("/"), os.environ, output=output)
    state = WarmServer(SETTINGS, ProcessId.of(process.pid), ProcessId.of(process.guard_pid), log_file(PORT))
    while not state.lives():  # the command line is readable shortly after the start
        time.sleep(0.01)
    state.write()
    process.detach()
    yield state
    stop_warm_servers()
    process.end()
    assert not state.lives()


def test_a_state_file_is_found_by_port(server: WarmServer) -> None:
    assert warm_server(PORT) == server
    assert warm_ports() == [PORT]
    assert warm_server(PORT + 1) is None
    assert engines_folder().stat().st_mode & 0o077 == 0


def test_a_warm_server_is_stopped_with_its_guard(server: WarmServer) -> None:
    assert stop_warm_servers() == [server]
    assert not server.lives()
    assert warm_server(PORT) is None
    assert stop_warm_servers() == []


def test_a_server_whose_guard_was_killed_is_stopped(server: WarmServer) -> None:
    os.kill(server.guard.pid, signal.SIGKILL)
    stop_warm_servers()  # Linux may have ended it by then
    assert not server.lives()
    assert warm_server(PORT) is None


def test_the_state_file_of_an_ended_process_is_removed(server: WarmServer) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    replace(server, server=replace(server.server, pid=gone.pid)).write()
    assert warm_server(PORT) is None
    assert warm_ports() == []
    server.write()


def test_a_reused_pid_is_not_mistaken_for_the_server(server: WarmServer) -> None:
    earlier = replace(server, server=replace(server.server, started=server.server.started - 60))
    assert not earlier.lives()
    renamed = replace(server, settings=replace(SETTINGS, seed=2))
    assert not renamed.lives()
    stranger = replace(server, guard=ProcessId.of(os.getpid()))  # this process would end
    stranger.stop()
    assert not server.lives()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {"model": 1}}', '{"settings": 5}'])
def test_an_unreadable_state_file_is_removed(text: str) -> None:
    path = engines_folder() / f"{PORT}.json"
    path.write_text(text)
    assert warm_server(PORT) is None
    assert not path.exists()


def test_a_state_file_of_another_port_is_ignored(server: WarmServer) -> None:
    state: dict[str, Any] = json.loads((engines_folder() / f"{PORT}.json").read_text())
    (engines_folder() / f"{PORT + 1}.json").write_text(json.dumps(state))
    assert warm_server(PORT + 1) is None


def test_a_server_in_use_is_neither_stopped_nor_started_twice(server: WarmServer) -> None:
    first, second = PortLock(PORT), PortLock(PORT)
    first.lock(exclusive=False)
    second.lock(exclusive=False)
    with pytest.raises(ServiceError, match=f"on port {PORT} is in use by another run"):
        first.lock(exclusive=True)
    with pytest.raises(ServiceError, match="in use"):
        stop_warm_servers()
    second.release()
    first.lock(exclusive=True)
    third = PortLock(PORT)
    with pytest.raises(ServiceError, match="is being started or stopped by another run"):
        third.lock(exclusive=False)
    third.release()
    first.release()
    assert server.lives()
