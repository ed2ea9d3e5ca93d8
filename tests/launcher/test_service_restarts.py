"""Restarts of a service that crashes, without a run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from astuner.config.services import ServiceConfig
from astuner.errors import ServiceError
from astuner.launcher.services import Service, restart_delay
from tests.launcher.liveness import lives, wait_for
from tests.launcher.service_processes import Declare, assert_gone, processes, served


@pytest.fixture
def service(declare: Declare, port: int, folder: Path) -> Iterator[Callable[..., Service]]:
    """Start a service without a run."""
    started: list[Service] = []

    def start(**more: Any) -> Service:
        started.append(Service("env", ServiceConfig.model_validate(served(port, **more)), folder))
        started[-1].start()
        return started[-1]

    yield start
    for service in started:
        service.stop()


def crash(port: int) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/crash", trust_env=False)


def test_a_service_is_restarted_as_often_as_configured(service: Callable[..., Service], port: int, log: list[str]):
    started = service(restart=1)
    before = processes()
    crash(port)
    wait_for(lambda: len([line for line in log if "ready after" in line]) == 2)
    assert "service env ended with exit code 7 during the run; restart 1 of 1" in log
    assert set(processes()).isdisjoint(before)
    assert not any(map(lives, before))
    crash(port)
    wait_for(lambda: "is not restarted (astuner.services.env.restart)" in log[-1])
    assert "    crashing" in log[-1]
    started.stop()
    assert_gone(port)


def test_a_failed_restart_counts(service: Callable[..., Service], port: int, folder: Path, log: list[str]):
    service(restart=2)
    (folder / "a_service.py").write_text("raise SystemExit('the licence has run out')")
    crash(port)
    wait_for(lambda: "is not restarted" in log[-1])
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
    wait_for(lambda: "is not restarted" in log[-1])
    wait_for(lambda: not any(map(lives, processes())), 20)
    assert_gone(port)


def test_the_delay_before_restarts_grows_to_a_limit() -> None:
    assert [restart_delay(restart) for restart in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 30, 30, 30]


def test_another_process_on_the_port_is_not_mistaken_for_the_service(service: Callable[..., Service], port: int):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
        place.listen()
        with pytest.raises(ServiceError, match=rf"port {port} is in use by process {os.getpid()} "):
            service()
