"""An OpenAI-compatible endpoint on 127.0.0.1 that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the endpoint answers after `seconds`: a chat completion with `text`, unless `body` is set.

    With `hang`, it answers nothing until the endpoint is closed.
    """

    text: str = ""
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    seconds: float = 0.0
    tokens: tuple[int, int] = (10, 5)


@dataclass(frozen=True)
class Request:
    body: dict[str, Any]
    key: str

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.body["messages"])


class ScriptedEndpoint:
    def __init__(self, answer: Callable[[Request], Reply]) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.ended = threading.Event()
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                request = Request(body, self.headers.get("authorization", "").removeprefix("Bearer "))
                with endpoint._lock:
                    endpoint.requests.append(request)
                    reply = endpoint.answer(request)
                    endpoint._at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint._at_once)
                endpoint.ended.wait(None if reply.hang else reply.seconds)
                with endpoint._lock:
                    endpoint._at_once -= 1
                if reply.hang:
                    return
                content = reply.body if reply.body is not None else completion(reply)
                self.send_response(reply.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def completion(reply: Reply) -> bytes:
    prompt, answer = reply.tokens
    return json.dumps(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "scripted",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply.text}}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer},
        }
    ).encode()


@contextmanager
def scripted_endpoint(answer: Callable[[Request], Reply]) -> Iterator[ScriptedEndpoint]:
    """Serve `answer`, which is called for one request at a time."""
    endpoint = ScriptedEndpoint(answer)
    try:
        yield endpoint
    finally:
        endpoint.close()


def in_turn(*replies: Reply) -> Callable[[Request], Reply]:
    """Answer with each reply in turn, and then always with the last."""
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]
