"""Faults of environments, clients and services: each is one clear error, and leaves no process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from astuner.env_service import host_process
from astuner.env_service.addresses import EnvServiceAddress
from astuner.env_service.client import EnvServiceClient
from astuner.errors import EnvError
from astuner.schema import EnvTask
from tests.env_service.services import Service, has_ended, serving, wait_until


def faulty(fault: str = "") -> EnvTask:
    return EnvTask("faulty", "train", "number-1", {"fault": fault})


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise", r"step raised RuntimeError: the dice are lost \(at .*environments.py:\d+\)"),
        ("system exit", "step raised SystemExit: 3"),
        ("exit", "the process of the environment ended with exit code 7"),
        ("kill", r"was killed by signal 9 \(SIGKILL\)"),
        ("nan", "step returned the reward nan; expected a finite number"),
        ("nan by agent", "inf.*; expected a finite number"),
        ("large", "10,485,760 bytes long; the limit of the service is 1,048,576 bytes"),
        ("large info", "the limit of the service is 1,048,576 bytes"),
        ("none", "step returned None; expected a StepResult"),
        ("tuple", "expected a StepResult"),
        ("no text", "expected an Observation with a text"),
        ("surrogate", "cannot be written as JSON"),
    ],
)
async def test_a_fault_in_a_step(client: EnvServiceClient, action: str, error: str) -> None:
    instance = await client.create(faulty())
    for _ in range(2):  # the instance stays useless
        with pytest.raises(EnvError, match=f"environment faulty, task number-1: .*{error}"):
            await instance.step(action)
    with pytest.raises(EnvError):
        await instance.evaluate()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("init", "ValueError: no such mode"),
        ("reset", "reset raised RuntimeError: the board is missing"),
        ("profile", "profile raised KeyError: 'no profile'"),
    ],
)
async def test_a_fault_at_the_start(client: EnvServiceClient, service: Service, fault: str, error: str) -> None:
    with pytest.raises(EnvError, match=error):
        await client.create(faulty(fault))
    assert client.client_id not in {each["client_id"] for each in service.instances()}


async def test_what_takes_too_long_ends_the_instance(tmp_path: Path) -> None:
    # The limit also applies to the creation of the instance whose step hangs.
    with serving(tmp_path, "--step-timeout=15") as service:
        client = EnvServiceClient(service.address)

        async def hang_in_step() -> None:
            instance = await client.create(faulty())
            for _ in range(2):
                with pytest.raises(EnvError, match=r"step took longer than 15 s \(--step-timeout"):
                    await instance.step("hang")
            with pytest.raises(EnvError, match="step took longer"):
                await instance.evaluate()

        async def hang_in_reset() -> None:
            with pytest.raises(EnvError, match=r"reset took longer than 15 s \(--step-timeout"):
                await client.create(faulty("hang"))

        await asyncio.gather(hang_in_step(), hang_in_reset())
        client.close()


@pytest.mark.parametrize(
    ("fault", "error"),
    [("evaluate", "the score is lost"), ("nan score", "the score nan"), ("no score", "returned no score")],
)
async def test_a_fault_in_the_evaluation(client: EnvServiceClient, fault: str, error: str) -> None:
    instance = await client.create(faulty(fault))
    with pytest.raises(EnvError, match=error):
        await instance.evaluate()


@pytest.mark.parametrize("fault", ["close", "hang in close"])
async def test_a_fault_at_the_end_leaves_no_process(client: EnvServiceClient, service: Service, fault: str) -> None:
    instance = await client.create(faulty(fault))
    (pid,) = [each["pid"] for each in service.instances() if each["instance_id"] == instance.instance_id]
    instance.release().result(300)
    wait_until(lambda: has_ended(int(str(pid))))


@pytest.mark.parametrize("kind", ["child", "child with a session"])
async def test_the_processes_of_an_environment_end_with_its_instance(client: EnvServiceClient, kind: str) -> None:
    instance = await client.create(faulty())
    child = int((await instance.step(kind)).observation.text)
    assert psutil.pid_exists(child)
    instance.release().result(300)
    wait_until(lambda: has_ended(child))


async def test_values_that_json_lacks_become_texts(client: EnvServiceClient) -> None:
    info = (await (await client.create(faulty())).step("object in info")).info
    assert info["set"] == [1]
    assert info["numpy"] == 0.5
    assert "object object" in info["object"]


async def test_an_action_that_is_no_action(client: EnvServiceClient) -> None:
    instance = await client.create(faulty())
    for action in (5, None, b"x", {"name": object()}):
        with pytest.raises(EnvError, match="expected a text, or a tool call"):
            await instance.step(action)  # type: ignore[arg-type]


async def test_a_wrong_token_is_rejected(tmp_path: Path) -> None:
    with serving(tmp_path, token="open-sesame") as service:
        for token in ("", "wrong"):
            client = EnvServiceClient(replace(service.address, token=token))
            with pytest.raises(EnvError, match=r"the token is missing or wrong; set .* ASTUNER_ENV_TOKEN"):
                await client.create(EnvTask("guess", "train", "number-1"))
            client.close()
        client = EnvServiceClient(service.address)
        assert (await client.create(EnvTask("guess", "train", "number-1"))).observation.text
        client.close()


async def test_a_service_that_is_gone_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = EnvServiceClient(EnvServiceAddress(url), retry_seconds=1.0)
        with pytest.raises(EnvError, match=rf"service at {url} cannot be reached .* attempts in"):
            await client.create(EnvTask("guess", "train", "number-1"))
        client.close()


async def test_a_full_service_makes_clients_wait(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-instances=2") as service:
        client = EnvServiceClient(service.address)
        task = EnvTask("guess", "train", "number-1")
        first, _ = await asyncio.gather(client.create(task), client.create(task))
        waiting = asyncio.ensure_future(client.create(task))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        first.release().result(300)
        assert (await waiting).observation.text
        hurried = EnvServiceClient(service.address, wait_seconds=0.5)
        with pytest.raises(EnvError, match="the service has 2 instances, the maximum"):
            await hurried.create(task)
        for each in (client, hurried):
            each.close()


_CLIENT = """
import asyncio, sys, time
from astuner.env_service import host_process
from astuner.env_service.addresses import EnvServiceAddress
from astuner.env_service.client import EnvServiceClient
from astuner.schema import EnvTask
async def main():
    client = EnvServiceClient(EnvServiceAddress(sys.argv[1]))
    held = [await client.create(EnvTask("guess", "train", "number-1")) for _ in range(3)]
    print("ready", flush=True)
    time.sleep(3600)
asyncio.run(main())
"""


def test_the_instances_of_a_killed_client_are_released(tmp_path: Path) -> None:
    with serving(tmp_path, "--lease-seconds=20") as service:
        client = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, service.address.url], stdout=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        assert len(service.instances()) == 3
        client.kill()
        client.wait()
        client.stdout.close()
        wait_until(lambda: not service.instances())


async def test_a_killed_service_leaves_no_process_and_can_be_restarted(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        client = EnvServiceClient(service.address, retry_seconds=300.0)
        instance = await client.create(EnvTask("faulty", "train", "number-1"))
        children = [int((await instance.step(kind)).observation.text) for kind in ("child", "child with a session")]
        below = service.processes()
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait()
        ended = [*children, *(process.pid for process in below)]
        await asyncio.to_thread(wait_until, lambda: all(map(has_ended, ended)))
    port = int(service.address.url.rpartition(":")[2])
    with serving(tmp_path, port=port):
        with pytest.raises(EnvError, match="does not exist; the service may have been restarted"):
            await instance.step("1")
        assert (await client.create(EnvTask("guess", "train", "number-1"))).observation.text
        client.close()


async def test_a_service_ends_if_it_cannot_start_environments(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        client = EnvServiceClient(service.address)
        await client.create(EnvTask("guess", "train", "number-1"))
        (forker,) = psutil.Process(service.process.pid).children()
        forker.kill()
        assert await asyncio.to_thread(service.process.wait, 300) == 1
        client.close()
    assert "the process that starts environments has ended" in "".join(
        log.read_text() for log in tmp_path.glob("service-*.log")
    )


def test_a_client_that_is_closed_during_a_creation_leaves_no_thread() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        client = EnvServiceClient(EnvServiceAddress(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        before = set(threading.enumerate())
        creating = client.submit(client._create(EnvTask("guess", "train", "number-1"), 0, "an id"))
        assert len(set(threading.enumerate()) - before) == 1
        client.close()
        assert not set(threading.enumerate()) - before
        assert creating.done()
        client.release("an id").result(0)


async def test_a_large_request_is_rejected(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.address.url, trust_env=False) as http:
        answer = await http.post("/v1/instances", json={"instance_id": "x" * 9_000_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_a_process_that_cannot_be_forked_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    own, control = socket.socketpair()
    first, second = socket.socketpair()
    with own, control, first, second:
        server = object.__new__(host_process._ForkServer)
        server.requests = control
        socket.send_fds(own, [struct.pack("!I", 5)], [second.fileno()])
        server.handle_request()
        assert not server.is_ending
        answer = json.loads(own.recv(1000))
    assert answer == {"failed": 5, "error": "[Errno 11] Resource temporarily unavailable"}


async def test_a_creation_may_take_as_long_as_its_operations() -> None:
    limits = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(
                200, json={"instances": 0, "max_instances": 1, "lease_seconds": 9, "step_timeout": 50}
            )
        limits.append((request.method, request.extensions["timeout"]["read"]))
        return httpx.Response(404, json={"error": {"code": "unknown_task", "message": "no such task"}})

    client = EnvServiceClient(EnvServiceAddress("http://127.0.0.1:1"), transport=httpx.MockTransport(answer))
    with pytest.raises(EnvError, match="no such task"):
        await client.create(EnvTask("guess", "train", "x"))
    with pytest.raises(EnvError, match="no such task"):
        await client.task(EnvTask("guess", "train", "x"))
    client.close()
    assert [limit for limit in limits if limit[0] != "DELETE"] == [("POST", 180.0), ("GET", 130.0)]
