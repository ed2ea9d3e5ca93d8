"""Redaction of what a process prints: its Python streams, its standard descriptors and its log."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TextIO, cast

from loguru import logger

from astuner.system.child_process import start_module, wait_or_kill
from astuner.system.redaction.redactor import learn_secrets, listening_for_secrets, redact

_STANDARD = (1, 2)
_FINISH_SECONDS = 10.0


class RedactingStream:
    """A sink for loguru that removes secrets from complete records, including tracebacks.

    Use it for every sink: `logger.add(RedactingStream(sys.stderr), diagnose=False)`. (`diagnose=True` would print the
    values of variables.) Records that cannot be written are lost, with one note on stderr, because logging must not
    stop a run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_failed = False

    def write(self, record: str) -> None:
        """Write one formatted record without its secrets."""
        try:
            self._stream.write(redact(record))
            self._stream.flush()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                sys.stderr.write(f"astuner: cannot write the log ({error}); later records may be missing from it\n")

    def flush(self) -> None:
        """Do nothing: every record is flushed when it is written."""

    def isatty(self) -> bool:
        """Return whether the stream is a terminal. loguru uses colours only on a terminal."""
        return self._stream.isatty()


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Remove secrets from the output of the process and its children during the block.

    File descriptors 1 and 2 are redirected through another process (see `filter_process`), which also receives the
    output of `os.write`, C libraries and child processes. A terminal is replaced with a pseudo-terminal, so that
    programs still detect one. Python streams with other targets, as in a notebook, are redacted piece by piece.
    """
    earlier = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    with _filtered_descriptors() as filtered:
        _redact_streams(except_to=filtered)
        try:
            yield
        finally:
            for name, stream in earlier.items():
                if stream is not None:
                    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
                        stream.flush()
                setattr(sys, name, stream)


def redact_output() -> None:
    """Remove secrets from all later output and log records of this process. For workers whose output is stored."""
    _redact_streams()
    logger.remove()
    if sys.stderr is not None:
        logger.add(RedactingStream(sys.stderr), diagnose=False)


def _redact_streams(except_to: Collection[int] = ()) -> None:
    for name in ("stdout", "stderr"):
        # None if the process was started with the stream closed.
        if (stream := getattr(sys, name)) is not None and _descriptor_of(stream) not in except_to:
            setattr(sys, name, _RedactedStream(stream))


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def reopened_stream(stream: TextIO, fd: int) -> TextIO:
    """Return a new stream on `fd` for a closed standard stream, redacted if the closed one was."""
    opened = open(fd, "r" if fd == 0 else "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    return cast(TextIO, _RedactedStream(opened)) if isinstance(stream, _RedactedStream) else opened


class _RedactedStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    @property
    def buffer(self) -> Any:
        return _RedactedBuffer(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _RedactedBuffer:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        text = bytes(data).decode("utf-8", "surrogateescape")
        self._stream.write(redact(text).encode("utf-8", "surrogateescape"))
        return len(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        self.write(b"".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_filter_lock = threading.Lock()


@contextlib.contextmanager
def _filtered_descriptors() -> Iterator[Collection[int]]:
    """Redirect the open standard descriptors through a filter process; nested blocks have no effect."""
    descriptors = [descriptor for descriptor in _STANDARD if _is_open(descriptor)]
    if not descriptors or not _filter_lock.acquire(blocking=False):
        yield descriptors
        return
    try:
        with contextlib.ExitStack() as stack:
            saved = {descriptor: os.dup(descriptor) for descriptor in descriptors}
            for copy in saved.values():
                stack.callback(os.close, copy)
            control = _start_filter(saved, stack)
            stack.enter_context(_announced_secrets(control))
            yield descriptors
    finally:
        _filter_lock.release()


def _start_filter(saved: dict[int, int], stack: contextlib.ExitStack) -> int:
    """Start the filter, and redirect the descriptors to it until `stack` closes; return its control descriptor."""
    readers: dict[int, int] = {}
    writers: dict[int, int] = {}
    for descriptor, copy in saved.items():
        twin = next((other for other in readers if os.path.sameopenfile(saved[other], copy)), None)
        if twin is not None:  # one channel, so that the order of the output is kept
            writers[descriptor] = os.dup(writers[twin])
        else:
            readers[descriptor], writers[descriptor] = _terminal_like(copy) if os.isatty(copy) else os.pipe()
    control_reader, control = os.pipe()
    pairs = [f"{readers[descriptor]}:{saved[descriptor]}" for descriptor in readers]
    process = start_module(
        "astuner.system.redaction.filter_process",
        str(control_reader),
        *pairs,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[control_reader, *readers.values(), *(saved[descriptor] for descriptor in readers)],
    )
    for descriptor in (control_reader, *readers.values()):
        os.close(descriptor)
    for descriptor, writer in writers.items():
        os.dup2(writer, descriptor)
        os.close(writer)

    def finish() -> None:
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
        os.close(control)
        wait_or_kill(process, _FINISH_SECONDS)  # it does not end while the terminal accepts no output

    stack.callback(finish)
    return control


def _terminal_like(terminal: int) -> tuple[int, int]:
    """Return the two sides of a pseudo-terminal that is as large as `terminal` and passes text on unchanged."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, b"\0" * 8))
    return reader, writer


@contextlib.contextmanager
def _announced_secrets(control: int) -> Iterator[None]:
    """Send the known secrets to the filter, including those that the process adds to its environment in the block."""

    def announce(secrets: list[str]) -> None:
        with contextlib.suppress(OSError):  # the filter was killed
            os.write(control, json.dumps(secrets).encode() + b"\n")

    _watch_environment()
    with listening_for_secrets(announce):
        yield


_is_watching = False


def _watch_environment() -> None:
    """Learn a secret as soon as it is added to an environment, before a child process can print it."""
    global _is_watching  # noqa: PLW0603

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.putenv":
            name, value = map(os.fsdecode, arguments)
            learn_secrets({name: value})
        elif event == "subprocess.Popen" and isinstance(arguments[3], dict):
            learn_secrets(
                {
                    os.fsdecode(name): os.fsdecode(value)
                    for name, value in arguments[3].items()
                    if os.environ.get(os.fsdecode(name)) != os.fsdecode(value)
                }
            )

    if not _is_watching:
        _is_watching = True
        sys.addaudithook(hook)  # cannot be removed


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
