"""The `serve-tinker` command: start, signals, errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from astuner.errors import ModelError, PluginError, ServiceError
from astuner.localhost import listen
from astuner.tinker_server import ServerOptions, serve
from tests.tinker_server.served import close_connections, tinker

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def astuner(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `astuner serve-tinker` in an empty folder."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "astuner", "serve-tinker", *arguments]
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.endswith(" (press Ctrl-C to stop)\n"), line
    return line.split(" at ")[1].split()[0]


def test_server_runs_until_sigterm(astuner: Start, model_folder: Path, tmp_path: Path):
    (tmp_path / "made.py").write_text(f"def folder():\n    return {str(model_folder)!r}\n")
    process = astuner("--model", "made->folder")
    url = address_of(process)
    with httpx.Client(base_url=f"{url}/api/v1") as http:
        models = http.get("/get_server_capabilities").json()["supported_models"]
        assert {item["model_name"] for item in models} == {str(model_folder), "made->folder"}
        assert {item["max_context_length"] for item in models} == {512}
        session = http.post("/create_session", json={"tags": []}).json()["session_id"]
        request = {"session_id": session, "model_seq_id": 0, "base_model": str(model_folder)}
        future = http.post("/create_model", json=request).json()
        created = http.post("/retrieve_future", json={"request_id": future["request_id"]}, timeout=60).json()
        saved = http.post("/save_weights", json={"model_id": created["model_id"], "path": "first"}).json()
        result = http.post("/retrieve_future", json={"request_id": saved["request_id"]}, timeout=60).json()
    process.terminate()
    _, err = process.communicate(timeout=180)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    folder = tmp_path / "launcher_record/tinker" / quote(created["model_id"], safe="") / "weights/first"
    assert result["path"] == f"tinker://{created['model_id']}/weights/first"
    assert (folder / "trained.safetensors").is_file()
    assert (folder / "optimiser.pt").is_file()


def test_ctrl_c_stops_the_server_while_clients_wait_and_send(astuner: Start, model_folder: Path):
    process = astuner("--model", str(model_folder))
    url = httpx.URL(address_of(process))
    client = tinker.ServiceClient(base_url=str(url), api_key="tml-for-tests")
    sampling = client.create_sampling_client(base_model=str(model_folder)).result()
    params = tinker.SamplingParams(max_tokens=500)
    with socket.create_connection((url.host, url.port), timeout=60) as sender:
        head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Length: 100\r\n"
        sender.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert sender.recv(100).startswith(b"HTTP/1.1 100 ")  # the server waits for the body
        waiting = [sampling.sample(tinker.ModelInput.from_ints([1]), 8, params) for _ in range(20)]
        process.send_signal(signal.SIGINT)
        answer = b"".join(iter(lambda: sender.recv(1000), b""))
    _, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server is shutting down" in answer
    for future in waiting:
        future.future().cancel()
    close_connections(client)


def test_errors_are_raised_before_the_server_starts(model_folder: Path, tmp_path: Path):
    def never(address: str, names: tuple[str, ...]) -> None:
        raise AssertionError(address)

    with listen(0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServiceError, match=f"port {port} is in use by process {os.getpid()}"):
            serve(ServerOptions(str(model_folder), port, folder=tmp_path), never)
    with pytest.raises(ModelError, match=r"--model is './nothing', which does not exist"):
        serve(ServerOptions("./nothing", folder=tmp_path), never)
    with pytest.raises(PluginError):
        serve(ServerOptions("no.such.module->function", folder=tmp_path), never)
