"""Connections that an environment service's client uses."""

from __future__ import annotations

import asyncio
from itertools import cycle

import httpx


class ConnectionPools(httpx.AsyncBaseTransport):
    """Distributes requests over several connection pools.

    For each request, a pool of httpcore visits all of its connections once per idle connection. With 128 connections in
    one pool, this takes longer than the rest of the request.
    """

    def __init__(self, pools: int, connections: int) -> None:
        """Create the pools.

        Args:
            pools: number of pools.
            connections: maximum number of connections of all pools.
        """
        context = httpx.create_ssl_context(trust_env=False)
        share = -(-connections // pools)
        limits = httpx.Limits(max_connections=share, max_keepalive_connections=share)
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=limits, trust_env=False) for _ in range(pools)]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request with the pool whose turn it is."""
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(pool.aclose() for pool in self._pools))
