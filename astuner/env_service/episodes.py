"""Gives episodes their environments, and releases them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING
from uuid import uuid4

from astuner.doors import through_door
from astuner.env_service.addresses import EnvServiceAddress, service_address
from astuner.errors import EpisodeTimeout
from astuner.schema import EnvInstance, WorkflowTask

if TYPE_CHECKING:
    from astuner.env_service.client import EnvServiceClient

# Environments that use NumPy's older generators or C code accept no larger seed.
_SEEDS = 2**31
_RELEASE_SECONDS = 5.0


class EpisodeEnvironments:
    """Creates and releases the environments for a process's episodes. Thread-safe.

    Args:
        addresses: the services by their addresses as configured.
    """

    def __init__(self, addresses: Mapping[str, EnvServiceAddress] | None = None) -> None:
        self._addresses = addresses or {}
        self._clients: dict[str, EnvServiceClient] = {}
        self._instances: dict[str, tuple[EnvServiceClient, str]] = {}
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def instance(self, workflow_task: WorkflowTask, seconds: float | None) -> AsyncIterator[EnvInstance | None]:
        """Create the instance for an episode's task, and release it when the block ends; None without environment.

        Args:
            seconds: the time limit of the creation, which waits for a free instance; None for no limit.

        Raises:
            EnvError: the environment cannot be created.
            EpisodeTimeout: it was not created in time.
        """
        if workflow_task.env is not None:  # the caller has created it, and releases it
            yield workflow_task.env
            return
        task = workflow_task.task.env
        if task is None:
            yield None
            return
        with self._lock:
            client = self._clients.get(task.url)
            if client is None:
                address = self._addresses.get(task.url) or service_address(task.url)
                client = self._clients[task.url] = through_door("environment", "client")(address)
        instance_id = uuid4().hex
        self._instances[workflow_task.episode_id] = client, instance_id
        try:
            try:
                async with asyncio.timeout(seconds) as limit:
                    instance = await client.create(task, workflow_task.seed % _SEEDS, instance_id)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise EpisodeTimeout(
                    f"environment {task.env_type} was not created within rollout.episode_timeout ({seconds:g} s)"
                ) from error
            yield instance
        finally:
            released = self.release(workflow_task.episode_id)
            if released is not None:
                # The next episode then finds a free instance.
                await asyncio.wait([asyncio.wrap_future(released)], timeout=_RELEASE_SECONDS)

    def release(self, episode_id: str) -> Future[None] | None:
        """Start to release the environment of an episode, if it has one. May be called again, from any thread."""
        client, instance_id = self._instances.pop(episode_id, (None, ""))
        return None if client is None else client.release(instance_id)

    def close(self) -> None:
        """Release all environments."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
