"""Programs in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import marshal
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from loguru import logger

from astuner.errors import SandboxError
from astuner.sandbox.fork_client import server
from astuner.system.process_tree import find_process, with_descendants

_READABLE = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/opt/conda"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/alternatives"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/mime.types", "/etc/fonts"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu"),
)
_MISSING = {
    "files": "the code can read your files (needs Linux 5.13 with Landlock)",
    "network": "the code can use the network (needs Linux with seccomp)",
    "processes": "the code sees other processes and its disk space is not limited (needs user namespaces)",
}
# A random folder would change the next answer of an agent that sees it.
_SHOWN_FOLDER = "/tmp/sandbox"
_MEMORY_POLL_SECONDS = 0.1
_REPORT_BYTES = 65_536
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of the sandbox.

    Attributes:
        cpu_seconds: each process's CPU time, at most the time limit of the call.
        memory: each process's address space, and the memory of all processes together, in bytes.
        processes: number of processes and threads.
        file_size: size of a file, in bytes.
        disk: size of the working directory, in bytes.
        open_files: open files of each process.
        output: size of stdout and stderr, each, in bytes; further output is discarded.
    """

    cpu_seconds: int = 300
    memory: int = 4 * 2**30
    processes: int = 64
    file_size: int = 64 * 2**20
    disk: int = 256 * 2**20
    open_files: int = 256
    output: int = 64 * 2**10


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a program in a sandbox.

    Attributes:
        returncode: the exit code; -n if signal n ended the program, and -1 if the sandbox did.
        stdout, stderr: the output, cut to the limit. `stderr` ends with the reason if the sandbox ended the program.
        missing: the protections that this system does not have; None if the program did not start.
        ended_by: `time` or `memory` if the program exceeded this limit and was ended; None if the program exited.
    """

    returncode: int
    stdout: str
    stderr: str
    missing: tuple[str, ...] | None = None
    ended_by: str | None = None

    @property
    def isolation(self) -> list[str] | None:
        """The protections that the program ran with; None if it did not start."""
        return None if self.missing is None else ["limits", *(name for name in _MISSING if name not in self.missing)]


@dataclass(frozen=True, slots=True)
class SandboxRoot:
    """A file system for a program: the readable files of the host, and writable folders.

    Attributes:
        mounts: folders of the host by their absolute paths in the sandbox.
        cwd: the working directory in the sandbox.
    """

    mounts: Mapping[str, str]
    cwd: str


async def run_python_program(
    code: str,
    timeout: float,
    limits: SandboxLimits = SandboxLimits(),
    *,
    files: Mapping[str, str] | None = None,
    stdin: str | None = None,
    isolated: bool = False,
) -> SandboxResult:
    """Run a Python program in a sandbox, in an empty working directory that is removed afterwards.

    Args:
        timeout: seconds of wall-clock time after which the program is ended.
        files: texts that are written to the working directory, by relative path.
        stdin: the program's stdin.
        isolated: whether the program's modules come from the Python environment only, and not from the working
            directory. The output is then buffered.

    Raises:
        SandboxError: the system cannot start a process.
    """
    files = {**(files or {}), "program.py": code} | ({} if stdin is None else {"stdin": stdin})
    job = {"arguments": ["program.py"], "files": files, "python": True, "isolated": isolated}
    return await _run(job | {"stdin": None if stdin is None else "stdin"}, timeout, limits)


async def run_program(
    arguments: Sequence[str],
    timeout: float,
    limits: SandboxLimits = SandboxLimits(),
    *,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    root: SandboxRoot | None = None,
) -> SandboxResult:
    """Run a program in a sandbox. Every process that it has started ends with it.

    Args:
        timeout: seconds of wall-clock time after which the program is ended.
        files: texts that are written to the working directory, by relative path.
        env: environment variables, in addition to those of the sandbox.
        root: the file system of the program. Without it, the program works in an empty folder, which is removed
            afterwards, and sees the paths of the host. The result names this folder `/tmp/sandbox`.

    Raises:
        SandboxError: the system cannot make the file system of the program, or cannot start a process.
    """
    job = {"arguments": list(arguments), "files": dict(files or {}), "python": False, "stdin": None}
    return await _run(job, timeout, limits, env=env or {}, root=root)


async def _run(
    job: Mapping[str, Any],
    timeout: float,
    limits: SandboxLimits,
    *,
    env: Mapping[str, str] | None = None,
    root: SandboxRoot | None = None,
) -> SandboxResult:
    """Run a job of `program_launcher`, with the values that all jobs have."""
    folder = tempfile.mkdtemp(prefix="astuner-sandbox-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        whole_job = {
            **job,
            "folder": folder,
            "root": None if root is None else asdict(root),
            "readable": _readable(),
            "env": _environment(folder) | dict(env or {}),
            "limits": asdict(limits) | {"cpu_seconds": min(limits.cpu_seconds, math.ceil(max(timeout, 0)) + 1)},
        }
        with tempfile.TemporaryFile() as file, contextlib.ExitStack() as ends:
            # JSON turns subclasses of str and int, which marshal rejects, into str and int.
            file.write(marshal.dumps(json.loads(json.dumps(whole_job))))
            file.seek(0)
            opened: list[tuple[_Stream, int]] = []
            for limit in (limits.output, limits.output, _REPORT_BYTES):
                stream, end = await _Stream.open(limit)
                stack.callback(stream.transport.close)
                ends.callback(os.close, end)
                opened.append((stream, end))
            (stdout, stdout_end), (stderr, stderr_end), (report, report_end) = opened
            number = server.start((file.fileno(), stdout_end, stderr_end, report_end), _environment("/"))
        try:
            ended_by = await _wait(report, number, timeout, limits.memory)
            await asyncio.wait([stdout.closed, stderr.closed])
        finally:
            await _end(report, number)
    out, err = (stream.text().replace(folder, _SHOWN_FOLDER) for stream in (stdout, stderr))
    return _result(_reported(report), out, err, ended_by, timeout, limits)


def _reported(report: _Stream) -> dict[str, Any]:
    """Return the values that the launcher has reported."""
    reported: dict[str, Any] = {}
    for line in report.text().splitlines(keepends=True):
        if line.endswith("\n"):
            reported |= ast.literal_eval(line)
    return reported


def _readable() -> list[str]:
    """Return the paths of the host that a program may read."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]  # also above prefixes
    return [*_READABLE, *sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, *packages})]


def _result(
    reported: Mapping[str, Any], stdout: str, stderr: str, ended_by: str | None, timeout: float, limits: SandboxLimits
) -> SandboxResult:
    if "pid" not in reported:
        raise SandboxError("the process of the program cannot be started; check the memory and `ulimit -u`")
    if "unsupported" in reported:
        raise SandboxError(
            f"this system cannot make a sandbox with its own file system: {reported['unsupported']}. It needs user "
            "namespaces: allow them (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; "
            "in a container, --security-opt seccomp=unconfined), or use a virtual machine"
        )
    missing = None if reported.get("missing") is None else tuple(reported["missing"])
    _warn_of(missing or ())
    if ended_by is None:
        return SandboxResult(reported.get("returncode", -9), stdout, stderr, missing)
    errors = {
        "time": f"TimeoutError: The code execution exceeded the timeout of {timeout} seconds.",
        "memory": f"MemoryError: The processes of the code used more than {limits.memory} bytes together.",
    }
    error = errors[ended_by]
    return SandboxResult(-1, stdout, f"{stderr}\n{error}" if stderr else error, missing, ended_by)


class _Stream(asyncio.Protocol):
    """The beginning of what processes write to a pipe.

    Attributes:
        closed: done when no process has the end of the pipe.
    """

    transport: asyncio.BaseTransport

    def __init__(self, limit: int) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._kept = bytearray()
        self._size = 0

    @classmethod
    async def open(cls, limit: int) -> tuple[Self, int]:
        """Return a stream and the end of its pipe for the processes."""
        reader, end = os.pipe()
        try:
            stream = cls(limit)
            await stream.closed.get_loop().connect_read_pipe(lambda: stream, os.fdopen(reader, "rb", 0))
        except BaseException:
            os.close(end)
            raise
        return stream, end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._size += len(data)
        self._kept += data[: self._limit - len(self._kept)]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def text(self) -> str:
        text = self._kept.decode("utf-8", errors="replace")
        cut = self._size - self._limit
        return f"{text}\n[{cut} more bytes were cut]" if cut > 0 else text


async def _wait(report: _Stream, number: int, timeout: float, memory: int) -> str | None:
    """Wait until the sandbox ends, or end it at a limit. Return the exceeded limit, or None if it ended itself."""
    ends_at = time.monotonic() + timeout
    while not report.closed.done():
        left = ends_at - time.monotonic()
        if left <= 0:
            limit = "time"
        elif _memory_of_processes(_reported(report).get("pid"), memory) > memory:
            limit = "memory"
        else:
            await asyncio.wait([report.closed], timeout=min(left, _MEMORY_POLL_SECONDS))
            continue
        await _end(report, number)
        return limit
    return None


async def _end(report: _Stream, number: int) -> None:
    """End the sandbox, which ends its processes first, and wait until it has ended."""
    if not report.closed.done():
        server.end(number)
        await asyncio.wait([report.closed])


def _memory_of_processes(pid: int | None, enough: int) -> int:
    """Return the memory of a process and its descendants, in bytes; if it is at most `enough`, an upper bound."""
    root = None if pid is None else find_process(pid)
    folders = [Path(f"/proc/{process.pid}") for process in with_descendants([root])] if root is not None else []
    bound = 0
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or this is not Linux
            _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            bound += (resident - shared) * _PAGE_BYTES
    if bound <= enough:
        return bound
    # Forked processes share pages, which the exact number counts once.
    exact = 0
    for folder in folders:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss: +(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
            exact += int(found[1]) * 1024 if found else 0
    return exact


def _environment(folder: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return threads | {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@cache
def _warn_of(missing: tuple[str, ...]) -> None:
    if missing:
        text = "; ".join(_MISSING[name] for name in missing)
        logger.warning("the sandbox of execute_python_code is incomplete on this machine: {}", text)
