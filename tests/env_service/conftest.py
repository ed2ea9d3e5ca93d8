"""Fixtures: a running service with the environments of these tests, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astuner.env_service.client import EnvServiceClient
from astuner.schema import EnvTask
from tests.env_service.services import Service, serving

NewClient = Callable[..., EnvServiceClient]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that tests share."""
    with serving(tmp_path_factory.mktemp("service"), "--step-timeout=300") as served:
        yield served


@pytest.fixture
def new_client(service: Service) -> Iterator[NewClient]:
    """Return a function that creates a client of a service, of the shared one by default."""
    clients = []

    def create(of: Service = service, **settings: float) -> EnvServiceClient:
        clients.append(EnvServiceClient(of.address, **settings))
        return clients[-1]

    yield create
    for client in clients:
        client.close()


@pytest.fixture
def client(new_client: NewClient) -> EnvServiceClient:
    """A client of the shared service."""
    return new_client()


@pytest.fixture
def task() -> EnvTask:
    """A task of the number game."""
    return EnvTask("guess", "train", "number-1")


@pytest.fixture(scope="session")
def here() -> Path:
    """The folder of these tests."""
    return Path(__file__).parent
