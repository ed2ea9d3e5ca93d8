"""A client of the Debug Adapter Protocol, as an editor is one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.preloaded import PythonProcess

SECONDS = 120.0


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

    def attach(self, source: Path, lines: Sequence[int] = ()) -> None:
        """Attach, with breakpoints at lines of a file, all of which have to be found."""
        self.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        attaching = self.send("attach", justMyCode=True)
        self.event("initialized")
        places = [{"line": line} for line in lines]
        set_there = self.ask("setBreakpoints", source={"path": str(source)}, breakpoints=places)
        assert [item["line"] for item in set_there["breakpoints"]] == list(lines)
        self.ask("configurationDone")
        self.answer(attaching)

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


def stopped_at(client: DebugClient, name: str) -> tuple[str, int, str]:
    """Wait for a stop in the main thread, continue, and return the function, the line and a variable's value."""
    stopped = client.event("stopped")
    threads = {thread["id"]: thread["name"] for thread in client.ask("threads")["threads"]}
    assert threads[stopped["threadId"]] == "MainThread"
    frame = client.ask("stackTrace", threadId=stopped["threadId"], levels=1)["stackFrames"][0]
    (locals_,) = [s for s in client.ask("scopes", frameId=frame["id"])["scopes"] if s["name"] == "Locals"]
    variables = client.ask("variables", variablesReference=locals_["variablesReference"])["variables"]
    client.ask("continue", threadId=stopped["threadId"], singleThread=True)
    return frame["name"], frame["line"], next(v["value"] for v in variables if v["name"] == name)


@contextmanager
def client_of(
    source: Path, command: Sequence[str], port: int, lines: Sequence[int] = (), *, is_forked: bool = True
) -> Iterator[DebugClient]:
    """Start a Python command in the folder of a source file, and attach to it when it listens. It must succeed."""
    with (source.parent / "out.txt").open("w") as out:
        process: PythonProcess | subprocess.Popen[bytes]
        if is_forked:
            process = PythonProcess(*command, cwd=source.parent, stdout=out)
        else:
            process = subprocess.Popen([sys.executable, *command], cwd=source.parent, stdout=out, stderr=out)
    client = DebugClient(port, SECONDS)
    try:
        client.attach(source, lines)
        yield client
    finally:
        client.close()
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    assert code == 0, (source.parent / "out.txt").read_text()


def line_of(source: Path, text: str) -> int:
    """Return the number of the first line of a file that contains a text."""
    return next(n for n, line in enumerate(source.read_text().splitlines(), 1) if text in line)
