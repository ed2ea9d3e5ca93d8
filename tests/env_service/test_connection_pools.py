"""The connections of the client: one pool does not see the connections of the others, and all are kept and closed."""

from __future__ import annotations

import asyncio

import httpx

from astuner.env_service.client import ConnectionPools

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_requests_use_the_pools_in_turn_and_keep_their_connections() -> None:
    opened: list[asyncio.StreamWriter] = []
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        while await reader.readline():
            while await reader.readline() not in (b"\r\n", b""):
                pass
            writer.write(_ANSWER)
            await writer.drain()
        writer.close()
        if all(each.is_closing() for each in opened):
            ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", transport=ConnectionPools(4, 8), trust_env=False
        ) as client:
            for _ in range(12):
                assert (await client.get("/")).text == "ok"
            assert len(opened) >= 4  # more if connections expired between the requests
            texts = await asyncio.gather(*(client.get("/") for _ in range(40)))
            assert {response.text for response in texts} == {"ok"}
            assert sum(not each.is_closing() for each in opened) <= 8
        await ended.wait()
