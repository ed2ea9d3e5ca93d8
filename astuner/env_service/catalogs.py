"""The processes that hold the environments' task lists."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from astuner.env_service.hosts import Host, HostServer
from astuner.env_service.protocol import EnvSource, EnvTypeInfo, ServiceRequestError
from astuner.errors import shorten

_MAX_CATALOGS = 32
# The key of the object with the lists of tasks; that of an instance is its id, which is not empty.
_TASKS_KEY = ""


@dataclass(eq=False)
class Catalog:
    """An environment's task lists.

    Attributes:
        host: their process.
        info: the splits and tools.
        instances: the number of instances in the same process, if the environment is `is_async`.
    """

    host: Host
    info: EnvTypeInfo
    instances: int = 0


class Catalogs:
    """The catalogs of all environments with their parameters, each started when it is first needed.

    Args:
        env_types: the environments by the names under which clients know them.
        server: starts the processes.
        timeout: the time limit of a request, in seconds.
    """

    def __init__(self, env_types: Mapping[str, str], server: HostServer, timeout: float) -> None:
        self._env_types = env_types
        self._server = server
        self._timeout = timeout
        self._catalogs: OrderedDict[str, Catalog] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, source: EnvSource) -> Catalog:
        """Return the catalog of an environment.

        Raises:
            ServiceRequestError: the service does not have it, or it cannot be created.
        """
        self._env_type(source.env_type)
        key = json.dumps([source.env_type, source.params, source.action_preference], sort_keys=True)
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                catalog = self._catalogs.get(key)
                if catalog is None or catalog.host.has_ended:
                    catalog = self._catalogs[key] = await self._start(source)
        finally:
            if not lock.locked():
                self._locks.pop(key, None)
        self._catalogs.move_to_end(key)
        unused = [key for key, old in self._catalogs.items() if not old.instances and old is not catalog]
        if len(self._catalogs) > _MAX_CATALOGS and unused:
            dropped = ServiceRequestError("process_ended", "the lists of tasks were dropped; retry")
            self._catalogs.pop(unused[0]).host.kill(dropped)
        return catalog

    async def ask(self, source: EnvSource, operation: str, **arguments: object) -> bytes:
        """Call `tasks` or `task`; return the result as JSON."""
        catalog = await self.get(source)
        try:
            return await catalog.host.request(_TASKS_KEY, operation, self._timeout, **arguments)
        except ServiceRequestError as error:
            if error.info.code == "timeout" and not catalog.instances:
                catalog.host.kill(error)
            raise

    def close(self, reason: ServiceRequestError) -> None:
        """End the processes. Their requests fail with `reason`."""
        for catalog in self._catalogs.values():
            catalog.host.kill(reason)

    async def load(self, host: Host, key: str, source: EnvSource) -> EnvTypeInfo:
        """Create an object of an environment in a host."""
        body = await host.request(
            key,
            "load",
            self._timeout,
            env_type=self._env_type(source.env_type),
            params=source.params,
            action_preference=source.action_preference,
        )
        return EnvTypeInfo.model_validate({"env_type": source.env_type, **json.loads(body)})

    async def _start(self, source: EnvSource) -> Catalog:
        host = await self._server.new_host()
        try:
            return Catalog(host, await self.load(host, _TASKS_KEY, source))
        except ServiceRequestError as error:
            host.kill(error)
            raise

    def _env_type(self, name: str) -> str:
        """Return the environment that clients know as `name`."""
        if name in self._env_types:
            return self._env_types[name]
        family, slash, _ = name.partition("/")
        if slash and "->" not in name and f"{family}/*" in self._env_types:
            return name
        served = ", ".join(map(repr, self._env_types))
        raise ServiceRequestError(
            "unknown_env_type", f"the service has no environment {shorten(name)!r}; it serves {served} (--env)"
        )
