"""The output of a program. It is read while the program runs, shortened, and redacted."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from astuner.system.redaction import Redactor, current_redactor

_CHUNK_BYTES = 2**16
_PIPE_BYTES = 2**20  # the largest pipe that a user may have
_MARGIN = 2**13  # more than the length of a secret


@dataclass(eq=False)
class ProgramOutput:
    """One output stream of a program; the beginning and the end are kept.

    Attributes:
        limit: the maximum size of the part that `text` returns, in bytes.
        size: the size of the part that was read, in bytes.
    """

    limit: int
    size: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """Yield the end of a pipe to write to, and read the other end until the block ends."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(read, self._read, read)
        try:
            yield write
        finally:
            loop.remove_reader(read)
            # A daemon of the program may hold the pipe open and write on, so the end of the file is not awaited.
            for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
                if not self._read(read):
                    break
            os.close(write)
            os.close(read)

    def _read(self, pipe: int) -> bool:
        """Read a chunk from the pipe; return whether it had any data."""
        try:
            data = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        kept = self.limit // 2 + _MARGIN
        room = kept - len(self._head)
        self.size += len(data)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * kept + _CHUNK_BYTES:
            del self._tail[:-kept]
        return bool(data)

    def text(self, api_key: str) -> str:
        """Return the stream without secrets and, if it is longer than the limit, without its middle."""
        redact = Redactor([*current_redactor().secrets, api_key])
        data = self._head + self._tail
        if self.size <= self.limit:
            return redact(_decoded(data))
        # Redacted before they are cut: a part of a secret is not recognised.
        half = self.limit // 2
        head, tail = data[: half + _MARGIN], data[-half - _MARGIN :]
        beginning = redact(_decoded(head))[: -len(_decoded(head[half:]))]
        end = redact(_decoded(tail), len(_decoded(tail[:_MARGIN])))
        return f"{beginning}\n[{self.size - 2 * half} bytes were cut]\n{end}"

    def last_line(self) -> str:
        """Return the last line that is not empty; "" if there is none."""
        return (_decoded(self._head + self._tail).strip().splitlines() or [""])[-1].strip()


def _decoded(data: bytes | bytearray) -> str:
    return data.decode("utf-8", errors="replace")
