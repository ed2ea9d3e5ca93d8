"""The process that redacts what another process and its children write to their standard descriptors.

It is a process and not a thread because a thread of the writer needs the interpreter's lock to empty the pipe: a C
library that writes while it holds the lock would wait forever. It also shows the last words of a writer that crashes.

`python -m astuner.redaction.filter_process CONTROL READ:WRITE ...` reads each READ descriptor and writes to WRITE. Each
line of CONTROL is a JSON list of the known secrets. At the end of CONTROL, what was written before it is shown, and the
process exits.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import select
import signal
import sys
import termios
from contextlib import suppress

from astuner.redaction.redactor import Redactor
from astuner.redaction.stream import StreamRedactor

_IDLE_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0
_CHUNK = 65536


class _Channel:
    """One descriptor to read, and the one to write to."""

    def __init__(self, source: int, target: int, known: list[Redactor]) -> None:
        self.source, self._target = source, target
        self.is_open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._stream = StreamRedactor(lambda: known[0])
        self._idle = 0.0
        os.set_blocking(source, False)

    @property
    def holds_text(self) -> bool:
        return self._stream.holds_text

    def read(self) -> bytes | None:
        """Return what can be read, b"" at the end, None if there is nothing at the moment."""
        try:
            return os.read(self.source, _CHUNK)
        except BlockingIOError:
            return None
        except OSError:  # on Linux, the other side of a pseudo-terminal is closed
            return b""

    def show(self, chunk: bytes) -> None:
        """Write the complete lines."""
        self._idle = 0.0
        self.is_open = chunk != b""
        self._write(self._stream.feed(self._decoder.decode(chunk)))

    def wait(self, seconds: float) -> None:
        """Write an unfinished line, such as a prompt, if nothing follows it."""
        self._idle += seconds
        self._write(self._stream.flush(patient=self._idle < _PATIENCE_SECONDS))

    def finish(self) -> None:
        """Write everything that is left in the descriptor and in the stream."""
        while self.is_open and (chunk := self.read()) is not None:
            self.show(chunk)
        self._write(self._stream.finish())

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", errors="surrogateescape")
        # A reader that is gone, or a full disk, must not stop the writer.
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._target, data) :]
                except BlockingIOError:
                    select.select([], [self._target], [])

    def copy_window_size(self) -> None:
        """Give the pseudo-terminal the size of the terminal."""
        with suppress(OSError):
            size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)


def main(control: int, pairs: list[tuple[int, int]]) -> None:
    """Filter until the end of `control`."""
    known = [Redactor(())]
    channels = [_Channel(source, target, known) for source, target in pairs]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the terminal sends them to all of its processes

    def copy_window_sizes(*_: object) -> None:
        for channel in channels:
            channel.copy_window_size()

    signal.signal(signal.SIGWINCH, copy_window_sizes)
    os.set_blocking(control, False)
    unread, is_open = b"", True
    while is_open:
        waiting = any(channel.holds_text for channel in channels)
        sources = [control, *(channel.source for channel in channels if channel.is_open)]
        ready, _, _ = select.select(sources, [], [], _IDLE_SECONDS if waiting else None)
        chunks = [(channel, channel.read()) for channel in channels if channel.source in ready]
        # After the output is read and before it is shown: a secret is announced before it is written.
        with suppress(BlockingIOError):
            while chunk := os.read(control, _CHUNK):
                unread += chunk
            is_open = False
        *lines, unread = unread.split(b"\n")
        if lines:
            known[0] = Redactor(json.loads(lines[-1]))
        for channel, read in chunks:
            if read is not None:
                channel.show(read)
        if not ready:
            for channel in channels:
                channel.wait(_IDLE_SECONDS)
    for channel in channels:
        channel.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]), [tuple(map(int, pair.split(":"))) for pair in sys.argv[2:]])  # type: ignore[misc]
