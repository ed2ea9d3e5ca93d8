"""Starts the command `astuner env serve`."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from astuner.env_service.addresses import EnvServiceAddress
from tests.preloaded import AstunerProcess

ENVIRONMENTS = Path(__file__).parent / "environments.py"
CLASSES = {"guess": "GuessNumber", "async": "AsyncGuessNumber", "faulty": "Faulty", "seats": "TwoSeats"}
_START_SECONDS = 600
_END_SECONDS = 300


@functools.cache
def _http() -> httpx.Client:
    """A client for all requests: each new one reads all of the machine's certificates."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Service:
    """A running service."""

    process: AstunerProcess
    address: EnvServiceAddress

    def processes(self) -> list[psutil.Process]:
        """The processes of the service below the command."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def instances(self) -> list[dict[str, object]]:
        """The instances of the service."""
        headers = {"Authorization": f"Bearer {self.address.token or 'none'}"}
        answer = _http().get(f"{self.address.url}/v1/instances", headers=headers)
        listed: list[dict[str, object]] = answer.raise_for_status().json()
        return listed


@contextlib.contextmanager
def serving(folder: Path, *options: str, token: str = "", port: int = 0) -> Iterator[Service]:
    """Serve the environments of these tests, and end the service after the block."""
    served = [f"--env={name}={ENVIRONMENTS}->{kind}" for name, kind in CLASSES.items()]
    log = folder / f"service-{time.monotonic_ns()}.log"
    with open(log, "w") as output:
        words = ("env", "serve", f"--port={port}", *served, *options)
        process = AstunerProcess(*words, cwd=folder, output=output, env=_environment(token))
    try:
        wait_until(lambda: "serving" in log.read_text() or process.poll() is not None, _START_SECONDS)
        found = re.search(r"at (http://\S+)", log.read_text())
        assert found, log.read_text()
        yield Service(process, EnvServiceAddress(found[1], token))
    finally:
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                for child in below:
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                raise
        process.wait(_END_SECONDS)


def _environment(token: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": python_path, "ASTUNER_ENV_TOKEN": token}


def wait_until(condition: object, seconds: float = 300.0) -> None:
    """Wait until a function returns a true value."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, perhaps without a parent that collects it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
