"""Measure what a model call costs at the gateway, compared with the same engine behind plain HTTP.

A process serves an engine that answers at once, twice: through the gateway, and through an application that only
decodes the body, calls the engine and encodes the answer. One client alternates between the two; the difference of the
medians is what the gateway adds: the key, the chat template, the parser and the record. Then 64 clients call the
gateway at the same time, in rounds of new episodes. Every answer repeats the end of its question, and is compared with
the question of its client and with the record.

Prints one line of JSON. `lost` counts calls without an answer or a record, and `crossed` those with another's. The
growth of memory is that after a quarter of the calls.

    python bench/bench_gateway.py [--calls 10000] [--clients 64] [--pairs 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CALLS_PER_EPISODE = 20
SYSTEM = "You are a careful assistant. Answer briefly, and repeat the number of the question. " * 3


def serve(connection: Connection) -> None:
    """Serve the engine twice, and open and close episodes on command."""
    from astuner.gateway.http_server import Gateway
    from astuner.model_tuner.chat_options import CallSettings
    from astuner.model_tuner.codec import ChatCodec
    from astuner.model_tuner.tuner import ModelTuner
    from tests.scripted_engine import ScriptedEngine
    from tutorial.tiny_tokenizer import build_tokenizer

    transcript = {"messages": [{"role": "user", "content": SYSTEM}], "tools": None}
    codec = ChatCodec(build_tokenizer([transcript], 4096), "qwen3")
    end = codec.stop_token_ids[0]

    def answer(prompt: Sequence[int], _params: Any) -> list[int]:
        last_end = len(prompt) - 1 - list(reversed(prompt)).index(end)
        return [*prompt[last_end - 8 : last_end], end]

    engine = ScriptedEngine(answer, 4096)
    gateway = Gateway()
    settings = CallSettings(max_model_len=4096, max_calls=10**6)
    with plain_server(engine, codec) as direct_url:
        connection.send(direct_url)
        while (command := connection.recv()) is not None:
            tuners = [
                ModelTuner(engine, codec, settings, episode_id=f"e{number}", endpoints=gateway)
                for number in range(command)
            ]
            with ExitStack() as episodes:
                for tuner in tuners:
                    episodes.enter_context(gateway.episode(tuner))
                connection.send([tuple(tuner.as_oai_baseurl_apikey()) for tuner in tuners])
                connection.recv()
                records = [
                    (f"chatcmpl-{call.call_id}", call.messages[1]["content"], call.messages[2]["content"], call.cut)
                    for tuner in tuners
                    for call in tuner.calls
                ]
            connection.send(records)
    gateway.close()


@contextmanager
def plain_server(engine: Any, codec: Any) -> Iterator[str]:
    """Serve the engine without the gateway: a JSON body in, one answer of the engine, a JSON body out."""
    import threading

    import orjson
    import uvicorn

    from astuner.schema import SamplingParams

    prompt = codec.render(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "question 00000000"}], None
    )

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        body = orjson.loads((await receive())["body"])
        completion = await engine.generate(prompt, SamplingParams(max_tokens=64))
        choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 8}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(completion.token_ids)}
        answer = {"id": "chatcmpl-0", "model": body["model"], "choices": [choice], "usage": usage}
        content = orjson.dumps(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


class Client:
    """A client with one connection, which costs less time than the servers that it measures."""

    def __init__(self, base_url: str, key: str = "none") -> None:
        url = urlsplit(base_url)
        self._host, self._port = url.hostname, url.port
        self._head = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, question: str) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = json.dumps({"model": "astuner", "messages": messages}).encode()
        writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        content = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(content.decode())
        return json.loads(content)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def latencies(direct: Client, gateway: Client, pairs: int) -> tuple[float, float]:
    """Return the medians of calls that alternate, in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs + pairs // 10):
        for client, taken in zip((direct, gateway), times, strict=True):
            started = time.perf_counter()
            await client.ask(f"question {number:08d}")
            taken.append((time.perf_counter() - started) * 1000)
    warm_up = pairs // 10
    return statistics.median(times[0][warm_up:]), statistics.median(times[1][warm_up:])


async def episodes(endpoints: Sequence[tuple[str, str]], first: int) -> list[tuple[str, str, str | None]]:
    """Call each endpoint repeatedly, all of them at the same time; return the ids, questions and answers."""

    async def episode(number: int, endpoint: tuple[str, str]) -> list[tuple[str, str, str | None]]:
        client = Client(*endpoint)
        results = []
        for call in range(CALLS_PER_EPISODE):
            question = f"question {first + number * CALLS_PER_EPISODE + call:08d}"
            completion = await client.ask(question)
            results.append((completion["id"], question, completion["choices"][0]["message"]["content"]))
        client.close()
        return results

    parts = await asyncio.gather(*(episode(number, endpoint) for number, endpoint in enumerate(endpoints)))
    return [result for part in parts for result in part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=2000)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    theirs.close()  # the end of the server ends the wait for it
    direct_url = ours.recv()
    process = psutil.Process(server.pid)
    ours.send(1)
    (endpoint,) = ours.recv()
    direct_p50, gateway_p50 = asyncio.run(latencies(Client(direct_url), Client(*endpoint), options.pairs))
    ours.send("records")
    ours.recv()
    lost = crossed = done = 0
    seconds, base = 0.0, None
    while done < options.calls:
        ours.send(options.clients)
        endpoints = ours.recv()
        started = time.perf_counter()
        answers = asyncio.run(episodes(endpoints, done))
        seconds += time.perf_counter() - started
        ours.send("records")
        records = {(identity, question): (text, cut) for identity, question, text, cut in ours.recv()}
        for identity, question, text in answers:
            record = records.get((identity, question))
            lost += record is None
            crossed += record is not None and (record != (text, False) or text != question[-8:])
        lost += len(answers) - len(records) if len(answers) > len(records) else 0
        done += len(answers)
        if base is None and done >= options.calls / 4:
            base = process.memory_info().rss
    growth = (process.memory_info().rss - (base or 0)) / 2**20
    ours.send(None)
    server.join(30)
    print(
        json.dumps(
            {
                "direct_p50_ms": round(direct_p50, 3),
                "gateway_p50_ms": round(gateway_p50, 3),
                "added_p50_ms": round(gateway_p50 - direct_p50, 3),
                f"calls_per_second_{options.clients}": round(done / seconds, 1),
                "calls": done,
                "lost": lost,
                "crossed": crossed,
                "rss_growth_mb": round(growth, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
