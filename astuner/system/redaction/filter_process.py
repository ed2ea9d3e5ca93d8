"""The process that redacts what another process and its children write to their standard descriptors.

The filter is a process and not a thread, because a thread of the writer would need the interpreter's lock to empty the
pipe: a C library that writes while it holds the lock would wait forever. A process also shows the last output of a
writer that crashes.

`python -m astuner.system.redaction.filter_process CONTROL READ:WRITE ...` reads each READ descriptor and writes to
WRITE. Each line in CONTROL is a JSON list of the known secrets. At the end of CONTROL, the process shows the remaining
output and exits.
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

from astuner.system.redaction.redactor import Redactor, StreamRedactor

_IDLE_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0
_CHUNK = 65536


class _Channel:
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
        """Return the bytes that are available: b"" at the end of the file, None if there are none yet."""
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
        """Count `seconds` without output, and write an unfinished line, such as a prompt."""
        self._idle += seconds
        self._write(self._stream.flush(patient=self._idle < _PATIENCE_SECONDS))

    def finish(self) -> None:
        """Write the remaining text from the descriptor and the stream."""
        while self.is_open and (chunk := self.read()) is not None:
            self.show(chunk)
        self._write(self._stream.finish())

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", errors="surrogateescape")
        # A closed reader or a full disk must not stop the writer.
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._target, data) :]
                except BlockingIOError:
                    select.select([], [self._target], [])

    def copy_window_size(self) -> None:
        """Set the pseudo-terminal's size to the terminal's."""
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
