"""Fixtures: a folder of two runs, and the viewer of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from astuner.system.localhost import listen, local_hosts
from astuner.viewer.http_server import create_app
from astuner.viewer.runs import IndexCache, Runs
from tests.viewer.browser import CHROMIUM, DRIVER, chromium
from tests.viewer.records import Agents, open_record, write_step

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium that tests share, because its start takes longer than most of them."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium with chromedriver on the PATH: install them to run these")
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="session")
def agents(tokenizer: Any) -> Agents:
    return Agents(tokenizer)


@pytest.fixture(scope="session")
def runs(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `first` and `second`, with different learning rates."""
    folder = tmp_path_factory.mktemp("launcher_record")
    model = folder / "tokenizer"
    agents.tokenizer.save_pretrained(model)
    for name, lr, lag in (("first", "1.0e-6", 0.0), ("second", "3.0e-6", 9.0)):
        with open_record(folder / name, str(model), lr) as record:
            for step in range(1, 4):
                write_step(record, agents, step, lag=lag)
            for step in range(4, 40):
                write_step(record, agents, step, tasks=0, lag=lag)
    return folder


@contextmanager
def client(folder: Path, cache: Path) -> Iterator[TestClient]:
    indexes = IndexCache(Runs(folder), cache)
    with TestClient(create_app(indexes, local_hosts(1234)), base_url="http://127.0.0.1:1234") as session:
        yield session
    indexes.close()


@pytest.fixture
def ask(runs: Path, tmp_path: Path) -> Iterator[Ask]:
    """Return a function that sends requests about the two runs to the API."""
    with client(runs, tmp_path) as session:

        def answer(path: str, **params: Any) -> Any:
            response = session.get(f"/api/{path}", params=params)
            assert response.status_code == 200, response.text
            return response.json()

        yield answer


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[str]:
    """Serve the page of a folder's runs on a free port and yield its address."""
    indexes = IndexCache(Runs(folder), cache)
    with listen(0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(create_app(indexes, local_hosts(port)), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.should_exit = True
            thread.join(10)
            indexes.close()
