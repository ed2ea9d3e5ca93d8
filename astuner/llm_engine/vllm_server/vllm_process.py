"""Starts a vLLM server for a run, or uses a warm one, and samples from it. Stops it afterwards unless it stays warm."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from astuner.config.root import AstunerConfig
from astuner.errors import ModelError, ServiceError
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.vllm_server.installation import installed_vllm
from astuner.llm_engine.vllm_server.settings import VllmSettings, differences, settings_for
from astuner.llm_engine.vllm_server.warm_servers import (
    GRACE_SECONDS,
    PortLock,
    ProcessId,
    WarmServer,
    is_ready,
    log_file,
    port_lock,
    warm_server,
)
from astuner.processes.guarded_process import GuardedProcess, ProcessLog, TempDir, last_lines
from astuner.system.localhost import is_port_taken, port_holder
from astuner.system.redaction.redactor import redact

_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 10.0
_LOG_TAIL_BYTES = 2**20
# Fixes of common failures, by a pattern in the server's output.
_FIXES = (
    (r"Free memory on device|gpu memory utilization", "lower rollout.gpu_memory_utilization, or free the GPU"),
    (
        r"No available memory for the cache blocks|KV cache.*(larger than|needed)",
        "lower rollout.max_model_len, or raise rollout.gpu_memory_utilization",
    ),
    (r"out of memory|DefaultCPUAllocator", "free memory, use a smaller model, or lower rollout.max_num_seqs"),
    (r"max_model_len \(\d+\) is greater", "lower rollout.max_model_len to the number of positions of the model"),
    (r"must be divisible by tensor parallel size", "set debug.debug_tensor_parallel_size to a divisor"),
    (r"address already in use", "choose another debug.debug_vllm_port"),
    (r"Model architectures .* are not supported", "this vLLM does not support the model: use rollout.name: embedded"),
)


@contextlib.contextmanager
def vllm_engine(config: AstunerConfig, model_path: str, folder: Path, keep: bool) -> Iterator[CompletionsEngine]:
    """Start a vLLM server, and yield an engine that samples from it.

    Args:
        model_path: folder or Hugging Face name of the model.
        folder: the run's record, which gets the server's log.
        keep: whether the server keeps running for later runs.

    Raises:
        BackboneError: vLLM is not installed.
        ServiceError: the server does not become ready.
    """
    settings = settings_for(config, model_path, installed_vllm())
    timeout = config.debug.debug_vllm_timeout
    with vllm_server(settings, folder, timeout, keep=keep):
        yield CompletionsEngine.connect(
            f"{settings.address}/v1",
            model=settings.name,
            default_model=settings.name,
            max_model_len=settings.max_model_len,
            api_key=None,
            launched=True,
            timeout=timeout,
        )


@contextlib.contextmanager
def vllm_server(settings: VllmSettings, record: Path, timeout: float, *, keep: bool) -> Iterator[None]:
    """Run a server with these settings during the block.

    A warm server with the same settings is used, and keeps running. A warm server with other settings is replaced.

    Args:
        record: the run's folder, for the log of a server that is stopped with the run.
        timeout: maximum seconds until the server is ready.
        keep: keep a server that is started here running after the block.

    Raises:
        ServiceError: another program uses the port, or the server does not become ready.
        ModelError: raised in the block; the server's last output is added to the message.
    """
    with port_lock(settings.port) as lock:
        warm = warm_server(settings.port)
        if warm is not None and warm.settings == settings and is_ready(settings):
            logger.info(
                "vllm: using the warm server on port {} (process {}); `astuner stop-engine` stops it",
                settings.port,
                warm.server.pid,
            )
            with _failures_explained(settings, warm.log):
                yield
            return
        with _started(settings, record, timeout, lock, warm, keep=keep) as log:
            lock.lock(exclusive=False)
            with _failures_explained(settings, log):
                yield


@contextlib.contextmanager
def _failures_explained(settings: VllmSettings, log: Path) -> Iterator[None]:
    """Add the server's last output to a `ModelError` of the block, and log an error if the server died during it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error}\n{explain_failure(log)}") from error
    if not is_ready(settings):
        logger.error("vllm: the server died during the run; {}", explain_failure(log))


@contextlib.contextmanager
def _started(
    settings: VllmSettings, record: Path, timeout: float, lock: PortLock, warm: WarmServer | None, *, keep: bool
) -> Iterator[Path]:
    """Start a server, which replaces `warm`, and stop it after the block unless `keep`. Yields its log file."""
    lock.lock(exclusive=True)
    if warm is not None:
        reason = differences(warm.settings, settings) or "it does not answer"
        logger.warning("vllm: stopping the warm server (process {}) to start a new one: {}", warm.server.pid, reason)
        warm.stop()
    if is_port_taken(settings.port):
        raise ServiceError(
            f"debug.debug_vllm_port {settings.port} is in use by {port_holder(settings.port)}, which astuner did not "
            "start; stop that process, or choose another port"
        )
    start = time.monotonic()
    with contextlib.ExitStack() as outputs, contextlib.ExitStack() as stack:
        if keep:  # the output goes to a file that outlives this process
            log, copier = log_file(settings.port), None
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            file = outputs.enter_context(open(descriptor, "wb"))
        else:
            copier, file = ProcessLog("vllm"), None
            log = copier.open(record)
            outputs.callback(copier.close)
        logger.info("vllm: starting a server for {} on port {}", settings.model, settings.port)
        logger.debug("vllm: {}", shlex.join(settings.argv))
        process = GuardedProcess(
            settings.argv,
            Path("/"),  # vLLM's own processes would import modules from the working directory
            settings.environment(os.environ),
            output=file,
            temp_dir=TempDir(),
            grace=GRACE_SECONDS,
        )
        reader = None
        if copier is not None:
            assert process.output
            reader = copier.follow(process.output)
            # With a timeout: a process that left the group may keep the pipe open.
            outputs.callback(reader.join, _PROGRESS_SECONDS)
        stack.callback(process.end)
        _wait_until_ready(process, settings, log, reader, timeout, start)
        logger.info("vllm: ready after {:.1f} s (process {})", time.monotonic() - start, process.pid)
        if keep:
            # The state file is written first: a server without one must not keep running.
            WarmServer(settings, ProcessId.of(process.pid), ProcessId.of(process.guard_pid), log).write()
            process.detach()
            stack.pop_all()
            logger.info("vllm: the server keeps running until `astuner stop-engine`. Its log: {}", log)
        yield log


def _wait_until_ready(
    process: GuardedProcess,
    settings: VllmSettings,
    log: Path,
    reader: threading.Thread | None,
    timeout: float,
    start: float,
) -> None:
    last_progress = start
    while not is_ready(settings):
        now = time.monotonic()
        if process.exit_code is not None:
            if reader is not None:
                reader.join(_PROGRESS_SECONDS)
            raise ServiceError(
                f"vLLM ended with exit code {process.exit_code} before it was ready; {explain_failure(log)}"
            )
        if now - start > timeout:
            raise ServiceError(
                f"vLLM was not ready within {timeout:g} s (debug.debug_vllm_timeout); {explain_failure(log)}"
            )
        if now - last_progress >= _PROGRESS_SECONDS:
            last_progress = now
            line = (_read_tail(log) or ["no output yet"])[-1]
            logger.info("vllm: starting for {:.0f} s: {}", now - start, redact(line)[:120])
        time.sleep(_POLL_SECONDS)


def explain_failure(log: Path) -> str:
    """Return the likely cause of a server's failure, its last output, and how to fix it."""
    lines = _read_tail(log)
    cause = next((line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)), None)
    likely_cause = f"likely cause: {redact(cause.strip())}\n" if cause is not None else ""
    return f"{likely_cause}{last_lines(lines)}\nlog: {log}\nhow to fix it: {suggest_fix(chr(10).join(lines))}"


def suggest_fix(output: str) -> str:
    """Return a fix for a server that failed with this output."""
    for pattern, fix in _FIXES:
        if re.search(pattern, output, re.IGNORECASE):
            return fix
    return "see the log, or sample in this process with rollout.name: embedded"


def _read_tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
