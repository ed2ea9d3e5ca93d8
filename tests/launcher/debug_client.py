"""A client of the Debug Adapter Protocol, as an editor is one."""

from __future__ import annotations

import json
import socket
import time
from typing import Any


class DebugClient:
    """Talks to a debug adapter that listens on 127.0.0.1."""

    def __init__(self, port: int, timeout: float) -> None:
        until = time.monotonic() + timeout
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
                break
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self._stream = self._socket.makefile("rb")
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request and return its number."""
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(request).encode()
        self._socket.sendall(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return self._number

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the body of its answer."""
        return self.answer(self.send(command, **arguments))

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a request."""
        while True:
            message = self._read()
            if message["type"] == "event":
                self._events.append(message)
            elif message.get("request_seq") == number:
                body: dict[str, Any] = message.get("body") or {}
                return body

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event and return its body."""
        while True:
            for message in self._events:
                if message["event"] == name:
                    self._events.remove(message)
                    body: dict[str, Any] = message.get("body") or {}
                    return body
            message = self._read()
            if message["type"] == "event":
                self._events.append(message)

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._stream.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the adapter has hung up"
        message: dict[str, Any] = json.loads(self._stream.read(length))
        assert message.get("success", True), message
        return message
