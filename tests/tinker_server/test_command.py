"""The `serve-tinker` command: start, signals, errors."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

import httpx
import pytest

from astuner.errors import ModelError, PluginError, ServiceError
from astuner.system.localhost import listen
from astuner.tinker_server.http_server import serve
from astuner.tinker_server.service import Limits
from tests.preloaded import PythonProcess
from tests.tinker_server.served import close_connections, tinker

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    """`astuner serve-tinker` in an empty folder."""

    process: PythonProcess
    stdout: TextIO
    stderr: Path

    def address(self) -> str:
        line = self.stdout.readline()
        assert line.endswith(" (press Ctrl-C to stop)\n"), line + self.stderr.read_text()
        return line.split(" at ")[1].split()[0]

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and its stderr."""
        return self.process.wait(180), self.stderr.read_text()


Start = Callable[..., Server]


@pytest.fixture
def astuner(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts it."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        error_file = tmp_path.with_name(f"{tmp_path.name}.stderr")
        reading, writing = os.pipe()
        with open(writing, "w") as stdout, error_file.open("w") as stderr:
            process = PythonProcess(
                *("-m", "astuner", "serve-tinker", *arguments),
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path},
                stdout=stdout,
                stderr=stderr,
            )
        started.append(Server(process, open(reading), error_file))  # noqa: SIM115
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()
        server.stdout.close()


def test_server_runs_until_sigterm(astuner: Start, model_folder: Path, tmp_path: Path):
    (tmp_path / "made.py").write_text(f"def folder():\n    return {str(model_folder)!r}\n")
    server = astuner("--model", "made->folder")
    url = server.address()
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
    server.process.send_signal(signal.SIGTERM)
    code, err = server.ended()
    assert code == 143, err
    assert "Traceback" not in err
    folder = tmp_path / "launcher_record/tinker" / quote(created["model_id"], safe="") / "weights/first"
    assert result["path"] == f"tinker://{created['model_id']}/weights/first"
    assert (folder / "trained.safetensors").is_file()
    assert (folder / "optimiser.pt").is_file()


def test_ctrl_c_stops_the_server_while_clients_wait_and_send(astuner: Start, model_folder: Path):
    server = astuner("--model", str(model_folder))
    url = httpx.URL(server.address())
    client = tinker.ServiceClient(base_url=str(url), api_key="tml-for-tests")
    sampling = client.create_sampling_client(base_model=str(model_folder)).result()
    params = tinker.SamplingParams(max_tokens=500)
    with socket.create_connection((url.host, url.port), timeout=60) as sender:
        head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Length: 100\r\n"
        sender.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert sender.recv(100).startswith(b"HTTP/1.1 100 ")  # the server waits for the body
        waiting = [sampling.sample(tinker.ModelInput.from_ints([1]), 8, params) for _ in range(20)]
        server.process.send_signal(signal.SIGINT)
        answer = b"".join(iter(lambda: sender.recv(1000), b""))
    code, err = server.ended()
    assert code == 130, err
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
            serve(str(model_folder), tmp_path, never, port=port, limits=Limits())
    with pytest.raises(ModelError, match=r"--model is './nothing', which does not exist"):
        serve("./nothing", tmp_path, never, limits=Limits())
    with pytest.raises(PluginError):
        serve("no.such.module->function", tmp_path, never, limits=Limits())
