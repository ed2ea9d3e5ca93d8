"""Services of a run, with real processes: start, readiness and errors."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from astuner import AstunerJob
from astuner.config.root import RunConfig
from astuner.config.services import BUILT_IN_SERVICES, ServiceConfig
from astuner.errors import ConfigError, ServiceError
from astuner.launcher.built_in_services import built_in_service
from astuner.launcher.services import Service, Services
from astuner.system.localhost import free_port, port_holder
from tests.launcher.conftest import Command
from tests.launcher.service_processes import Declare, assert_gone, served

RUN = Path("launcher_record/run")
ONE_STEP = "astuner.trainer_common.total_training_steps=1"


def test_the_viewer_runs_during_a_run(astuner: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICES", "http://127.0.0.1:8765/api/runs")
    agent = "astuner.rollout.agentscope_workflow='agents->AsksServices'"
    ended = astuner("--with-logview", "--conf", "run.yaml", ONE_STEP, agent)
    assert ended.code == 0, ended.out
    assert "left out" not in ended.out  # every episode had its answer
    assert "http://127.0.0.1:8765" in (RUN / "services/logview.log").read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8765)) != 0


def test_services_run_during_the_run_only(
    astuner: Command, declare: Declare, port: int, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    other = free_port()
    (folder / "elsewhere").mkdir()
    shutil.copy(folder / "a_service.py", folder / "elsewhere")
    with_token = {"ENV_TOKEN": "private-to-the-service", "NUMBER": 5}
    second = {"command": [sys.executable, "a_service.py", str(other), "../second"], "health": {"port": other}}
    declare(first=served(port, env=with_token), second={**second, "cwd": "elsewhere"}, unused={"command": "x"})
    monkeypatch.setenv("OPENAI_API_KEY", "plainlooking-0a1b2c3d")
    monkeypatch.setenv("SERVICES", f"http://127.0.0.1:{port}/health http://127.0.0.1:{other}/health")
    agent = "astuner.rollout.agentscope_workflow='agents->AsksServices'"
    ended = astuner("--with-first", "--conf", "run.yaml", "--with-second", ONE_STEP, agent)
    assert ended.code == 0, ended.out
    assert "left out" not in ended.out
    assert_gone(port)
    assert_gone(other, "second")
    assert (RUN / "services/first.log").read_text().startswith("keys: [redacted] [redacted]\n")
    assert (RUN / "services/second.log").read_text().startswith("keys: [redacted] None\n")
    assert sorted(path.name for path in (RUN / "services").iterdir()) == ["first.log", "second.log"]
    for path in RUN.rglob("*"):
        if path.is_file():
            assert b"private-to-the-service" not in path.read_bytes(), path
    assert "private-to-the-service" not in ended.out


def test_check_starts_services_too(astuner: Command, declare: Declare, port: int):
    declare(env=served(port))
    ended = astuner("check", "--conf", "run.yaml", "--with-env", "--dry-run")
    assert ended.code == 0, ended.out
    assert "service env: ready after" in ended.out
    assert_gone(port)
    assert (RUN.with_name("run-check") / "services/env.log").exists()


def test_a_service_that_is_not_ready_in_time(astuner: Command, declare: Declare, port: int):
    declare(env=served(port, path="/nothing", timeout=2))
    astuner("--conf", "run.yaml", "--with-env").says(
        f"service env was not ready within 2 s (http://127.0.0.1:{port}/nothing answers with status 404)",
        "raise astuner.services.env.timeout",
        "its last lines:\n    keys: None None",
    )
    assert_gone(port)


def test_a_service_that_fails_to_start_stops_those_before_it(astuner: Command, declare: Declare, port: int):
    dies = "sh -c 'echo no licence found; sleep 0.3; exit 3'"
    declare(
        first=served(port),
        env={"command": dies},
        signalled={"command": "sh -c 'kill -9 $$'"},
        away={"command": "sh -c 'sleep 100 &'"},
    )
    RUN.mkdir(parents=True)
    (RUN / "environment.json").write_text('{"record_format": 1}')
    astuner("--conf", "run.yaml", "--with-first", "--with-env").says(
        "service env ended with exit code 3 before it was ready; its last lines:\n    no licence found"
    )
    assert_gone(port)
    assert not RUN.with_name("run.1").exists()  # no earlier record is moved aside for this
    astuner("--conf", "run.yaml", "--with-signalled").says("ended with exit code 137", "it printed nothing")
    astuner("--conf", "run.yaml", "--with-away").says("ended with exit code 0", "must stay in the foreground")


@pytest.mark.parametrize("how", ["ports", "port", "http"])
def test_a_port_in_use_is_named_with_its_holder(astuner: Command, declare: Declare, how: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        used_port = server.getsockname()[1]
        health = {"ports": {}, "port": {"port": used_port}, "http": {"http": f"http://localhost:{used_port}/x"}}[how]
        declare(env={"command": "sleep 100", "ports": [used_port] if how == "ports" else [], "health": health})
        holder = f"process {os.getpid()} ({psutil.Process().name()})"
        astuner("--conf", "run.yaml", "--with-env").says(
            f"service env: port {used_port} is in use by {holder}; end that"
        )


def test_a_job_has_services_too(declare: Declare, port: int, monkeypatch: pytest.MonkeyPatch):
    declare(env=served(port))
    monkeypatch.setenv("SERVICES", f"http://127.0.0.1:{port}/health")
    job = AstunerJob().load_job_from_yaml("run.yaml")
    job.configure({"trainer_common.total_training_steps": 1}).set_workflow("agents->AsksServices")
    tuned = job.tune(services=["env"])
    assert tuned.metrics.episodes.ok == 8
    assert_gone(port)
    with pytest.raises(ConfigError, match="did you mean --with-env"):
        job.tune(services=["emv"])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--with-evn"], ["--with-evn: there is no service 'evn'; did you mean --with-env?", "declares env (", "ray,"]),
        (["--with-ray"], ["--with-ray needs ray, which is not installed", 'pip install "ray[default]"']),
        (["--with-ray-cluster"], ["--with-ray-cluster needs ray, which is not installed"]),
        (["--with-appworld"], ["--with-appworld needs appworld", "astuner install appworld", "appworld download data"]),
        (["--with-env"], ["service env cannot be started", "No such file", "no-such-program"]),
        (["--with-env", "astuner.services.env.cwd=nowhere"], ["services.env.cwd is 'nowhere'", "no such folder"]),
    ],
)
def test_a_service_that_cannot_be_started(astuner: Command, declare: Declare, arguments: list[str], parts: list[str]):
    declare(env={"command": "no-such-program", "cwd": None})
    astuner("--conf", "run.yaml", *arguments).says(*parts)


RAY = """
import pathlib, socketserver, sys, time
with open("starts", "a") as starts:
    starts.write("start ")
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
server = socketserver.TCPServer(("127.0.0.1", port), socketserver.BaseRequestHandler)
if pathlib.Path("busy").exists():
    pathlib.Path("busy").unlink()
    sys.exit("Exception: The current node timed out during startup. This could happen because")
time.sleep(0.5)
print("Ray runtime started.", flush=True)
server.serve_forever()
"""
"""A substitute for Ray that has the same command line. Its port is open before it has started."""


@pytest.fixture
def ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ray/scripts").mkdir(parents=True)
    (folder / "ray/__init__.py").touch()
    (folder / "ray/scripts/scripts.py").write_text(RAY)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("command", [("check",), ("check", "--dry-run"), ()])
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("rollout.agentscope_workflow='agent->Agent'", "Did you mean `agents->Agent`?"),
        ("task_reader.dataset_file.training.file_path=trian.jsonl", "Did you mean train.jsonl"),
        ("model.path=./modle", "did you mean 'model'?"),
    ],
)
def test_requests_are_rejected_before_ray_starts(
    astuner: Command, command: tuple[str, ...], mistake: str, message: str
):
    ended = astuner(*command, "--with-ray", "--conf", "run.yaml", f"astuner.{mistake}")
    ended.says(message)
    assert "service ray" not in ended.out
    assert not Path("starts").exists()


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("command", [("check",), ("check", "--dry-run")])
def test_ray_starts_once_for_a_check_that_succeeds(astuner: Command, command: tuple[str, ...]):
    ended = astuner(*command, "--with-ray", "--conf", "run.yaml", ONE_STEP)
    assert ended.code == 0, ended.out
    assert ended.out.count("service ray: ready after") == 1
    assert Path("starts").read_text() == "start "


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("name", ["ray", "ray-cluster"])
def test_ray_is_ready_when_its_node_has_registered(name: str, tmp_path: Path):
    head = built_in_service(name, RunConfig().astuner, tmp_path)
    config = head.config.model_copy(update={"ports": []})
    service = Service(name, config, Path.cwd(), ready_text=head.ready_text)
    try:
        service.start()
        assert "Ray runtime started." in service.log.tail()
    finally:
        service.stop()


@pytest.mark.usefixtures("ray")
def test_ray_is_started_again_after_its_own_timeout(astuner: Command):
    Path("busy").touch()
    ended = astuner("--with-ray", "--conf", "run.yaml", ONE_STEP)
    assert ended.code == 0, ended.out
    assert ended.out.count("service ray: Ray did not start within its 30 s; starting it again") == 1
    assert ended.out.count("service ray: ready after") == 1
    assert Path("starts").read_text() == "start start "


@pytest.mark.parametrize("arguments", [["--kill=ray|python"], ["--kill", "ray"], ["--autokill"]])
def test_killing_by_name_is_explained(astuner: Command, arguments: list[str]):
    ended = astuner("--conf", "run.yaml", *arguments)
    assert ended.code == 2
    output = " ".join(ended.out.split())
    assert f"{arguments[0].partition('=')[0]} was removed, because it ended processes by name" in output
    assert "A run stops the services that it started" in output


def test_built_in_services_are_processes_in_the_foreground(tmp_path: Path):
    common = {"device": "cpu", "n_gpus_per_node": 2}
    config = RunConfig.model_validate({"astuner": {"trainer_common": common}}).astuner
    commands = {name: built_in_service(name, config, tmp_path) for name in BUILT_IN_SERVICES}
    assert commands["logview"].config.argv == [sys.executable, "-m", "astuner", "view", str(tmp_path), "--port", "8765"]
    assert commands["logview"].package == ""
    local, open_to_others = commands["ray"], commands["ray-cluster"]
    for head in (local, open_to_others):
        assert head.config.argv[3:6] == ["start", "--head", "--block"]
        assert "--num-gpus=2" in head.config.argv
        assert head.config.env["CUDA_VISIBLE_DEVICES"] == "0,1"  # Ray declares no more than it shows
        assert head.ray is not None
        assert head.ray.address == f"127.0.0.1:{head.config.health.port}"
    assert "--node-ip-address=127.0.0.1" in local.config.argv
    assert not any("ip-address" in word for word in open_to_others.config.argv)
    assert (local.config.health.port == 6379, open_to_others.config.health.port) == (False, 6379)
    assert commands["appworld"].config.argv == ["appworld", "serve", "environment", "--port", "8000"]
    assert commands["appworld"].config.health.port == 8000


@pytest.mark.parametrize(
    ("names", "address", "message"),
    [
        (
            ["ray", "ray-cluster"],
            None,
            "--with-ray and --with-ray-cluster each start a Ray instance; remove one of them",
        ),
        (
            ["ray"],
            "auto",
            r"--with-ray starts a Ray instance, but astuner.trainer_common.ray_address names one to join; remove",
        ),
    ],
)
def test_a_run_has_one_ray(names: list[str], address: str | None, message: str, tmp_path: Path):
    config = RunConfig.model_validate({"astuner": {"trainer_common": {"ray_address": address}}})
    with pytest.raises(ConfigError, match=message):
        Services.from_names(names, config, tmp_path, tmp_path)


def test_two_services_on_one_port(astuner: Command, declare: Declare, port: int):
    declare(first=served(port), second={"command": "x", "ports": [port]})
    astuner("--with-first", "--with-second", "--conf", "run.yaml", ONE_STEP).says(
        f"--with-first and --with-second both use port {port}"
    )
    assert not Path("note").exists()


@pytest.mark.parametrize("status", [200, 503])
def test_a_health_address_that_streams_for_ever_answers_by_its_status(folder: Path, port: int, status: int):
    (folder / "streams.py").write_text(
        "import http.server, time\n"
        "class Streams(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        f"        self.send_response({status}); self.end_headers()\n"
        "        while True:\n"
        "            self.wfile.write(b'.'); self.wfile.flush(); time.sleep(0.1)\n"
        f"http.server.ThreadingHTTPServer(('127.0.0.1', {port}), Streams).serve_forever()\n"
    )
    health = {"http": f"http://127.0.0.1:{port}/"}
    config = ServiceConfig.model_validate({"command": "python streams.py", "health": health, "timeout": 8})
    service = Service("env", config, folder)
    try:
        if status == 200:
            service.start()
        else:
            with pytest.raises(ServiceError, match=r"was not ready within 8 s .*answers with status 503"):
                service.start()
    finally:
        service.stop()


def test_the_holder_of_a_port_is_who_listens_there(port: int):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", port))
        listens = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); "
        listens += "print(1, flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", listens], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            try:
                assert port_holder(port).startswith(f"process {process.pid} ")
            finally:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/", "http://[::1/", "http://127.0.0.1:abc/", "http://:80/", "x"]
)
def test_invalid_health_addresses(astuner: Command, declare: Declare, url: str):
    declare(env={"command": "x", "health": {"http": url}})
    astuner("--with-env", "--conf", "run.yaml", ONE_STEP).says("services.env.health.http", "an address such as")


def test_the_viewer_uses_a_free_port_if_its_default_is_in_use(astuner: Command, folder: Path):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 8765))
        place.listen()
        ended = astuner("--with-logview", "--conf", "run.yaml", ONE_STEP)
    assert ended.code == 0, ended.out
    (ready,) = [line for line in ended.out.splitlines() if "service logview: ready after" in line]
    assert " at http://127.0.0.1:" in ready
    assert ":8765/" not in ready


def test_viewers_of_runs_that_start_together_have_different_ports(tmp_path: Path):
    first, second = (Services.from_names(["logview"], RunConfig(), tmp_path, tmp_path / name) for name in "ab")
    with first.running(), second.running():
        pass
    del first
    third = built_in_service("logview", RunConfig().astuner, tmp_path)
    assert third.config.argv[-1] == "8765"
