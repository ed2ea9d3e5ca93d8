"""Services of a run, with real processes: started, waited for, watched, and gone afterwards, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from astuner import AstunerJob
from astuner.config.services import BUILT_IN_SERVICES, ServiceConfig
from astuner.errors import ConfigError, ServiceError
from astuner.launcher.service import Service, pause
from astuner.launcher.services import built_in
from astuner.ports import holder
from tests.launcher.conftest import HERE, Command

RUN = Path("launcher_record/run")
ONE_STEP = "astuner.trainer_common.total_training_steps=1"
HANGS = "astuner.rollout.agentscope_workflow='agents->HangsFromTheStart'"

Declare = Callable[..., None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def declare(folder: Path) -> Declare:
    """Declare services in run.yaml: `declare(name={"command": …})`."""
    shutil.copy(HERE / "a_service.py", folder)

    def write(**services: dict[str, Any]) -> None:
        tree = yaml.safe_load((folder / "run.yaml").read_text())
        tree["astuner"]["services"] = services
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))

    return write


def served(port: int, note: str = "note", path: str = "/health", **more: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}{path}"
    return {"command": f"python a_service.py {port} {note}", "health": {"http": url}, "timeout": 30, **more}


def processes(note: str = "note") -> list[int]:
    """The processes that a service has noted."""
    return [int(pid) for pid in Path(note).read_text().split()]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_gone(port: int, note: str = "note") -> None:
    assert len(processes(note)) == 2
    assert not [pid for pid in processes(note) if lives(pid)]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_viewer_runs_beside_a_run(astuner: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICES", "http://127.0.0.1:8765/api/runs")
    agent = "astuner.rollout.agentscope_workflow='agents->AsksServices'"
    ended = astuner("--with-logview", "--conf", "run.yaml", ONE_STEP, agent)
    assert ended.code == 0, ended.out
    assert "left out" not in ended.out  # every episode had its answer
    assert "http://127.0.0.1:8765" in (RUN / "services/logview.log").read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8765)) != 0


def test_a_run_has_its_services_and_leaves_none(
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


def test_a_service_that_dies_at_its_start_takes_those_before_it_along(astuner: Command, declare: Declare, port: int):
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
    astuner("--conf", "run.yaml", "--with-away").says("ended with exit code 0", "has to stay in the foreground")


@pytest.mark.parametrize("how", ["ports", "port", "http"])
def test_a_port_in_use_is_named_with_its_holder(astuner: Command, declare: Declare, how: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        health = {"ports": {}, "port": {"port": taken}, "http": {"http": f"http://localhost:{taken}/x"}}[how]
        declare(env={"command": "sleep 100", "ports": [taken] if how == "ports" else [], "health": health})
        holder = f"process {os.getpid()} ({psutil.Process().name()})"
        astuner("--conf", "run.yaml", "--with-env").says(f"service env: port {taken} is in use by {holder}; end that")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["astuner.model.path=./nowhere"], "./nowhere"),
        (["astuner.rollout.agentscope_workflow='agents->AlwaysRaises'"], "episodes failed"),
    ],
)
def test_services_stop_when_the_run_fails(
    astuner: Command, declare: Declare, port: int, settings: list[str], error: str
):
    declare(env=served(port))
    astuner("--conf", "run.yaml", "--with-env", *settings).says(error)
    assert_gone(port)


@pytest.fixture
def hanging(declare: Declare, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own, in the middle of its first step, with a service `env`."""
    declare(env=served(port, env={"STUBBORN": 1}))
    arguments = ["--conf", "run.yaml", "--with-env", HANGS]
    with (folder / "out.txt").open("wb") as out:
        run = subprocess.Popen([sys.executable, "-m", "astuner", *arguments], cwd=folder, stdout=out, stderr=out)
    try:
        wait_for(lambda: (RUN / "services/env.log").exists() and Path("note").exists())
        assert all(map(lives, processes()))
        yield run
    finally:
        run.kill()
        run.wait()
        for pid in filter(lives, processes()):
            os.kill(pid, signal.SIGKILL)


def test_ctrl_c_stops_services(hanging: subprocess.Popen[bytes], port: int, folder: Path):
    time.sleep(1)
    hanging.send_signal(signal.SIGINT)
    assert hanging.wait(60) == 130, (folder / "out.txt").read_text()
    assert_gone(port)  # by SIGKILL for the child, which ignores SIGTERM


def test_services_do_not_outlive_a_launcher_that_is_killed(hanging: subprocess.Popen[bytes], port: int):
    hanging.kill()
    hanging.wait()
    wait_for(lambda: not any(map(lives, processes())), 20)
    assert_gone(port)


FORKS_AND_IS_KILLED = """
import os, signal, sys, time
from pathlib import Path
from astuner.processes.guarded_process import GuardedProcess
service = GuardedProcess(["sleep", "600"], Path.cwd(), os.environ)
child = os.fork()
if child == 0:
    time.sleep(600)
print(service.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_process_that_outlives_the_launcher_keeps_no_service_alive(tmp_path: Path):
    with (tmp_path / "out").open("w+") as out:
        subprocess.run([sys.executable, "-c", FORKS_AND_IS_KILLED], stdout=out, timeout=60, check=False)
        out.seek(0)
        service, child = map(int, out.read().split())
    try:
        wait_for(lambda: not lives(service), 20)
        assert lives(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_ctrl_c_while_a_service_is_waited_for(astuner: Command, declare: Declare, port: int):
    declare(env=served(port, path="/nothing"))

    def interrupt() -> None:
        wait_for(Path("note").exists)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    ended = astuner("--conf", "run.yaml", "--with-env")
    impatient.join()
    assert ended.code == 130, ended.out
    assert ended.out.endswith("interrupted\n")
    assert_gone(port)


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


@pytest.fixture
def service(declare: Declare, port: int, folder: Path) -> Iterator[Callable[..., Service]]:
    """Start a service without a run."""
    started: list[Service] = []

    def start(**more: Any) -> Service:
        started.append(Service("env", ServiceConfig.model_validate(served(port, **more)), folder))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


def crash(port: int) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/crash", trust_env=False)


def test_a_service_is_started_again_as_often_as_asked(service: Callable[..., Service], port: int, log: list[str]):
    started = service(restart=1)
    before = processes()
    crash(port)
    wait_for(lambda: len([line for line in log if "ready after" in line]) == 2)
    assert "service env ended with exit code 7 before the run did; starting it again, for the 1. time" in log
    assert set(processes()).isdisjoint(before)
    assert not any(map(lives, before))
    crash(port)
    wait_for(lambda: "is not started again (astuner.services.env.restart)" in log[-1])
    assert "    crashing" in log[-1]
    started.stop()
    assert_gone(port)


def test_a_restart_that_fails_counts_as_one(service: Callable[..., Service], port: int, folder: Path, log: list[str]):
    service(restart=2)
    (folder / "a_service.py").write_text("raise SystemExit('the licence has run out')")
    crash(port)
    wait_for(lambda: "is not started again" in log[-1])
    failures = [line for line in log if "ended with exit code 1 before it was ready" in line]
    assert len(failures) == 2
    assert all("the licence has run out" in line for line in failures)
    assert_gone(port)


def test_a_service_whose_guard_is_killed_is_ended(service: Callable[..., Service], port: int, log: list[str]):
    service()
    leader = psutil.Process(processes()[0])
    guard = leader.parent()
    assert guard is not None
    assert "astuner.processes.guard" in " ".join(guard.cmdline())
    assert os.getpgid(leader.pid) == leader.pid == os.getpgid(processes()[1])
    guard.kill()
    wait_for(lambda: "is not started again" in log[-1])
    wait_for(lambda: not any(map(lives, processes())), 20)
    assert_gone(port)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--with-evn"], ["--with-evn: there is no service 'evn'; did you mean --with-env?", "declares env (", "ray,"]),
        (["--with-ray"], ["--with-ray needs ray, which is not installed", 'pip install "ray[default]"']),
        (["--with-ray-cluster"], ["--with-ray-cluster needs ray, which is not installed"]),
        (["--with-appworld"], ["--with-appworld needs appworld", "pip install appworld", "appworld download data"]),
        (["--with-env"], ["service env cannot be started", "No such file", "no-such-program"]),
        (["--with-env", "astuner.services.env.cwd=nowhere"], ["services.env.cwd is 'nowhere'", "no such folder"]),
    ],
)
def test_what_cannot_be_started_is_said(astuner: Command, declare: Declare, arguments: list[str], parts: list[str]):
    declare(env={"command": "no-such-program", "cwd": None})
    astuner("--conf", "run.yaml", *arguments).says(*parts)


@pytest.mark.parametrize("arguments", [["--kill=ray|python"], ["--kill", "ray"], ["--autokill"]])
def test_killing_by_name_is_explained(astuner: Command, arguments: list[str]):
    ended = astuner("--conf", "run.yaml", *arguments)
    assert ended.code == 2
    said = " ".join(ended.out.split())
    assert f"{arguments[0].partition('=')[0]} of older versions ended processes by their name" in said
    assert "A run stops what it started itself" in said


def test_built_in_services_are_processes_in_the_foreground(tmp_path: Path):
    commands = {name: built_in(name, tmp_path) for name in BUILT_IN_SERVICES}
    assert commands["logview"].config.argv == [sys.executable, "-m", "astuner", "view", str(tmp_path), "--port", "8765"]
    assert commands["logview"].package == ""
    head = ["ray", "start", "--head", "--block"]
    assert commands["ray"].config.argv[:4] == commands["ray-cluster"].config.argv[:4] == head
    assert set(commands["ray"].config.argv) - set(commands["ray-cluster"].config.argv) == {
        "--node-ip-address=127.0.0.1"
    }
    assert commands["ray"].config.health.port == 6379
    assert commands["appworld"].config.argv == ["appworld", "serve", "environment", "--port", "8000"]
    assert commands["appworld"].config.health.port == 8000


def test_two_services_on_one_port_are_refused(astuner: Command, declare: Declare, port: int):
    declare(first=served(port), second={"command": "x", "ports": [port]})
    astuner("--with-first", "--with-second", "--conf", "run.yaml", ONE_STEP).says(
        f"--with-first and --with-second both use port {port}"
    )
    assert not Path("note").exists()


def test_a_port_that_is_taken_between_two_starts_is_not_taken_for_the_service(
    service: Callable[..., Service], port: int
):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
        place.listen()
        with pytest.raises(ServiceError, match=rf"port {port} is in use by process {os.getpid()} "):
            service()


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
    one = Service("env", config, folder)
    try:
        if status == 200:
            one.start()
        else:
            with pytest.raises(ServiceError, match=r"was not ready within 8 s .*answers with status 503"):
                one.start()
    finally:
        one.stop()


def test_the_pause_between_starts_grows_to_an_end() -> None:
    assert [pause(starts) for starts in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 30, 30, 30]


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
                assert holder(port).startswith(f"process {process.pid} ")
            finally:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/", "http://[::1/", "http://127.0.0.1:abc/", "http://:80/", "x"]
)
def test_a_health_address_that_is_none_is_refused_by_the_configuration(astuner: Command, declare: Declare, url: str):
    declare(env={"command": "x", "health": {"http": url}})
    astuner("--with-env", "--conf", "run.yaml", ONE_STEP).says("services.env.health.http", "an address such as")


def test_the_viewer_takes_a_free_port_where_its_own_is_held(astuner: Command, folder: Path):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 8765))
        place.listen()
        ended = astuner("--with-logview", "--conf", "run.yaml", ONE_STEP)
    assert ended.code == 0, ended.out
    (said,) = [line for line in ended.out.splitlines() if "service logview: ready after" in line]
    assert " at http://127.0.0.1:" in said
    assert ":8765/" not in said


def test_a_service_ends_when_launcher_and_guard_are_killed_together(hanging: subprocess.Popen[bytes], port: int):
    leader = processes()[0]
    guard = psutil.Process(leader).parent()
    assert guard is not None
    assert guard.ppid() == hanging.pid
    os.kill(guard.pid, signal.SIGSTOP)  # so that it cannot act on the launcher's end
    hanging.kill()
    guard.kill()
    hanging.wait()
    wait_for(lambda: not lives(leader), 10)
