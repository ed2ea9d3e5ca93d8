"""Notes about kept servers are checked against what runs."""

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

from astuner.backbone.vllm_server.kept import (
    KeptServer,
    PortLock,
    ProcessId,
    engines_folder,
    kept_ports,
    kept_server,
    log_file,
    stop_kept_servers,
)
from astuner.backbone.vllm_server.settings import VllmSettings
from astuner.errors import ServiceError
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
def kept() -> Iterator[KeptServer]:
    """A process with the server's name in its command line, kept and noted."""
    argv = [sys.executable, "-c", "import time; time.sleep(600)", SETTINGS.name]
    with log_file(PORT).open("wb") as output:
        process = GuardedProcess(argv, Path("/"), os.environ, output=output)
    note = KeptServer(SETTINGS, ProcessId.of(process.pid), ProcessId.of(process.guard_pid), log_file(PORT))
    while not note.lives():  # its command line can be read a moment after its start
        time.sleep(0.01)
    note.write()
    process.keep()
    yield note
    stop_kept_servers()
    process.end()
    assert not note.lives()


def test_a_note_is_read_back_by_its_port(kept: KeptServer) -> None:
    assert kept_server(PORT) == kept
    assert kept_ports() == [PORT]
    assert kept_server(PORT + 1) is None
    assert engines_folder().stat().st_mode & 0o077 == 0


def test_a_kept_server_is_ended_with_its_guard(kept: KeptServer) -> None:
    assert stop_kept_servers() == [kept]
    assert not kept.lives()
    assert kept_server(PORT) is None
    assert stop_kept_servers() == []


def test_a_server_whose_guard_was_killed_is_ended(kept: KeptServer) -> None:
    os.kill(kept.guard.pid, signal.SIGKILL)
    stop_kept_servers()  # Linux may have ended it by then
    assert not kept.lives()
    assert kept_server(PORT) is None


def test_a_note_of_a_process_that_has_ended_is_removed(kept: KeptServer) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    replace(kept, server=replace(kept.server, pid=gone.pid)).write()
    assert kept_server(PORT) is None
    assert kept_ports() == []
    kept.write()


def test_a_later_process_of_the_same_number_is_not_taken_for_it(kept: KeptServer) -> None:
    earlier = replace(kept, server=replace(kept.server, started=kept.server.started - 60))
    assert not earlier.lives()
    renamed = replace(kept, settings=replace(SETTINGS, seed=2))
    assert not renamed.lives()
    stranger = replace(kept, guard=ProcessId.of(os.getpid()))  # this process would end
    stranger.stop()
    assert not kept.lives()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {"model": 1}}', '{"settings": 5}'])
def test_a_note_that_says_nothing_is_removed(text: str) -> None:
    path = engines_folder() / f"{PORT}.json"
    path.write_text(text)
    assert kept_server(PORT) is None
    assert not path.exists()


def test_a_note_about_another_port_is_not_believed(kept: KeptServer) -> None:
    note: dict[str, Any] = json.loads((engines_folder() / f"{PORT}.json").read_text())
    (engines_folder() / f"{PORT + 1}.json").write_text(json.dumps(note))
    assert kept_server(PORT + 1) is None


def test_a_server_in_use_is_neither_ended_nor_started_twice(kept: KeptServer) -> None:
    one, other = PortLock(PORT), PortLock(PORT)
    one.share()
    other.share()
    with pytest.raises(ServiceError, match=f"on port {PORT} is in use by another run"):
        one.own()
    with pytest.raises(ServiceError, match="in use"):
        stop_kept_servers()
    other.release()
    one.own()
    third = PortLock(PORT)
    with pytest.raises(ServiceError, match="is being started or stopped by another run"):
        third.share()
    third.release()
    one.release()
    assert kept.lives()
