"""A vLLM server for one run: started and waited for, or found warm; ended with the run, or kept."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from loguru import logger

from astuner.backbone.vllm_server.advice import advice_for
from astuner.backbone.vllm_server.kept import (
    GRACE_SECONDS,
    KeptServer,
    PortLock,
    ProcessId,
    answers,
    kept_server,
    log_file,
    port_lock,
)
from astuner.backbone.vllm_server.settings import VllmSettings, differences
from astuner.errors import ModelError, ServiceError
from astuner.ports import holder, is_taken
from astuner.processes.guarded_process import GuardedProcess, OwnFolder
from astuner.processes.log import ProcessLog, last_lines
from astuner.run_record import redact

_POLL_SECONDS = 0.25
_SAY_SECONDS = 10.0
_READ_BYTES = 2**20


@contextlib.contextmanager
def vllm_server(settings: VllmSettings, record: Path, timeout: float, *, keep: bool) -> Iterator[None]:
    """Have a server with these settings during the block.

    One that an earlier run has kept is used, and stays. One with other settings is ended, and a new one started.

    Args:
        settings: what is needed.
        record: the run's folder, which gets the log of a server that is started and not kept.
        timeout: seconds within which it has to be ready.
        keep: leave a server that is started here running.

    Raises:
        ServiceError: the port is somebody else's, or the server does not become ready.
        ModelError: raised in the block, with what the server said last.
    """
    with port_lock(settings.port) as lock:
        kept = kept_server(settings.port)
        if kept is not None and kept.settings == settings and answers(settings):
            logger.info(
                "vllm: the server on port {} (process {}) is warm; `astuner stop-engine` ends it",
                settings.port,
                kept.server.pid,
            )
            with _watched(settings, kept.log):
                yield
            return
        with _started(settings, record, timeout, lock, kept, keep=keep) as log:
            lock.share()
            with _watched(settings, log):
                yield


@contextlib.contextmanager
def _watched(settings: VllmSettings, log: Path) -> Iterator[None]:
    """Say it if the server has ended by itself, or refuses the first request: whoever asked knows no reason."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error}\n{last_words(log)}") from error
    if not answers(settings):
        logger.error("vllm: the server ended during the run; {}", last_words(log))


@contextlib.contextmanager
def _started(
    settings: VllmSettings, record: Path, timeout: float, lock: PortLock, kept: KeptServer | None, *, keep: bool
) -> Iterator[Path]:
    """Start a server in the place of `kept`, and end it unless it is to be kept; yields its log."""
    lock.own()
    if kept is not None:
        reason = differences(kept.settings, settings) or "it does not answer"
        logger.warning("vllm: ending the kept server (process {}) to start a new one: {}", kept.server.pid, reason)
        kept.stop()
    if is_taken(settings.port):
        raise ServiceError(
            f"debug.debug_vllm_port {settings.port} is in use by {holder(settings.port)}, which astuner did not start; "
            "end that process, or choose another port"
        )
    began = time.monotonic()
    output = _kept_output(settings.port) if keep else _recorded_output(record)
    with output as out, contextlib.ExitStack() as ends:
        process = _launch(settings, out)
        ends.callback(process.end)
        _await_ready(process, settings, out, timeout, began)
        logger.info("vllm: ready after {:.1f} s (process {})", time.monotonic() - began, process.pid)
        if keep:
            # Noted first: what is not noted must not stay.
            KeptServer(settings, ProcessId.of(process.pid), ProcessId.of(process.guard_pid), out.log).write()
            process.keep()
            ends.pop_all()
            logger.info("vllm: the server stays; `astuner stop-engine` ends it. Its log: {}", out.log)
        yield out.log


class _Output:
    """Where a server's output goes: through a copier to the run record, or to a file of its own that outlives this."""

    def __init__(self, log: Path, *, file: IO[bytes] | None = None, copier: ProcessLog | None = None) -> None:
        self.log = log
        self.file = file
        self._copier = copier
        self._reader: threading.Thread | None = None

    def follow(self, process: GuardedProcess) -> None:
        """Copy what the process prints, where it does not write to the file itself."""
        if self._copier is not None:
            assert process.output
            self._reader = self._copier.follow(process.output)

    def settle(self) -> None:
        """Wait until all that a process that has ended had printed is in the log."""
        if self._reader is not None:
            # Something that left the group may hold the pipe open for ever.
            self._reader.join(_SAY_SECONDS)


@contextlib.contextmanager
def _kept_output(port: int) -> Iterator[_Output]:
    log = log_file(port)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        yield _Output(log, file=file)


@contextlib.contextmanager
def _recorded_output(record: Path) -> Iterator[_Output]:
    copier = ProcessLog("vllm")
    output = _Output(copier.open(record), copier=copier)
    try:
        yield output
    finally:
        output.settle()
        copier.close()


def _launch(settings: VllmSettings, output: _Output) -> GuardedProcess:
    logger.info("vllm: starting a server for {} on port {}", settings.model, settings.port)
    logger.debug("vllm: {}", shlex.join(settings.argv))
    env = settings.environment(os.environ)
    # Not in the working directory, whose files could be taken for packages that vLLM imports in its own processes.
    process = GuardedProcess(
        settings.argv, Path("/"), env, output=output.file, own_tmp=OwnFolder(), grace=GRACE_SECONDS
    )
    output.follow(process)
    return process


def _await_ready(process: GuardedProcess, settings: VllmSettings, out: _Output, timeout: float, began: float) -> None:
    said = began
    while not answers(settings):
        now = time.monotonic()
        if process.exit_code is not None:
            out.settle()
            words = last_words(out.log)
            raise ServiceError(f"vLLM ended with exit code {process.exit_code} before it was ready; {words}")
        if now - began > timeout:
            words = last_words(out.log)
            raise ServiceError(f"vLLM was not ready within {timeout:g} s (debug.debug_vllm_timeout); {words}")
        if now - said >= _SAY_SECONDS:
            said = now
            line = (_lines(out.log) or ["it has printed nothing yet"])[-1]
            logger.info("vllm: starting for {:.0f} s: {}", now - began, redact(line)[:120])
        time.sleep(_POLL_SECONDS)


def last_words(log: Path) -> str:
    """What a server that failed said last, what seems to be the cause, and what to do about it."""
    lines = _lines(log)
    cause = next((line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)), None)
    named = f"it seems to be: {redact(cause.strip())}\n" if cause is not None else ""
    return f"{named}{last_lines(lines)}\nlog: {log}\nwhat to do: {advice_for(chr(10).join(lines))}"


def _lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _READ_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
