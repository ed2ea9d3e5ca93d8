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
from astuner.errors import ServiceError
from astuner.processes.guarded_process import GuardedProcess
from astuner.processes.log import ProcessLog, last_lines
from astuner.processes.ports import holder, is_taken
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
    """Say it if the server has ended by itself: episodes only know that nobody answered."""
    yield
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
        logger.warning(
            "vllm: ending the kept server on port {} (process {}): {}", settings.port, kept.server.pid, reason
        )
        kept.stop()
    if is_taken(settings.port):
        raise ServiceError(
            f"debug.debug_vllm_port {settings.port} is in use by {holder(settings.port)}, which astuner did not start; "
            "end that process, or choose another port"
        )
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        if keep:
            log = log_file(settings.port)
            output = stack.enter_context(open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"))
            process = _launch(settings, output)
        else:
            log = record / "services" / "vllm.log"
            process = _launch(settings, None)
            stack.enter_context(_logged(process, record))
        ends = stack.enter_context(contextlib.ExitStack())
        ends.callback(process.end)
        _await_ready(process, settings, log, timeout, began)
        logger.info("vllm: ready after {:.1f} s (process {})", time.monotonic() - began, process.pid)
        if keep:
            # Noted first: what is not noted must not stay.
            KeptServer(settings, ProcessId.of(process.pid), ProcessId.of(process.guard_pid), log).write()
            process.keep()
            ends.pop_all()
            logger.info("vllm: the server stays; `astuner stop-engine` ends it. Its log: {}", log)
        yield log


def _launch(settings: VllmSettings, output: IO[bytes] | None) -> GuardedProcess:
    logger.info("vllm: starting a server for {} on port {}", settings.model, settings.port)
    logger.debug("vllm: {}", shlex.join(settings.argv))
    env = settings.environment(os.environ)
    # Not in the working directory, whose files could be taken for packages that vLLM imports in its own processes.
    return GuardedProcess(settings.argv, Path("/"), env, output=output, own_tmp=True, grace=GRACE_SECONDS)


@contextlib.contextmanager
def _logged(process: GuardedProcess, record: Path) -> Iterator[None]:
    assert process.output
    log = ProcessLog("vllm")
    log.open(record)
    reader: threading.Thread = log.follow(process.output)
    try:
        yield
    finally:
        reader.join(_SAY_SECONDS)
        log.close()


def _await_ready(process: GuardedProcess, settings: VllmSettings, log: Path, timeout: float, began: float) -> None:
    said = began
    while not answers(settings):
        now = time.monotonic()
        if process.exit_code is not None:
            raise ServiceError(f"vLLM ended with exit code {process.exit_code} before it was ready; {last_words(log)}")
        if now - began > timeout:
            raise ServiceError(f"vLLM was not ready within {timeout:g} s (debug.debug_vllm_timeout); {last_words(log)}")
        if now - said >= _SAY_SECONDS:
            said = now
            logger.info(
                "vllm: starting for {:.0f} s: {}", now - began, (_lines(log) or ["nothing printed yet"])[-1][:120]
            )
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
