"""Tools for agents. Python code that the model writes runs in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from astuner.processes.episode_processes import current_episode_processes
from astuner.processes.process_tree import find_process, with_descendants

if TYPE_CHECKING:
    from agentscope.tool import ToolResponse

_LAUNCHER = Path(__file__).parent / "processes" / "sandbox_launcher.py"
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
_CHUNK_BYTES = 2**16
_MEMORY_POLL_SECONDS = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of the sandbox.

    Attributes:
        cpu_seconds: CPU time of each process, at most the time limit of the call.
        memory: address space of each process, and memory of all processes together, in bytes.
        processes: number of processes and threads.
        file_size: size of a file, in bytes.
        disk: size of the working directory, in bytes.
        open_files: open files of each process.
        output: size of stdout and of stderr, in bytes; further output is discarded.
    """

    cpu_seconds: int = 300
    memory: int = 4 * 2**30
    processes: int = 64
    file_size: int = 64 * 2**20
    disk: int = 256 * 2**20
    open_files: int = 256
    output: int = 64 * 2**10


@dataclass(frozen=True, slots=True)
class _Ended:
    returncode: int
    stdout: str
    stderr: str
    missing: tuple[str, ...] | None = None

    @property
    def isolation(self) -> list[str] | None:
        """The protections that the code ran with; None if it did not start."""
        return None if self.missing is None else ["limits", *(name for name in _MISSING if name not in self.missing)]


async def run_python(code: str, timeout: float = 300, **kwargs: Any) -> ToolResponse:
    """Execute Python code in a sandbox, and return its return code, standard output and standard error.

    The code must print its result. It runs in a separate process without network, in an empty working directory that is
    removed afterwards. It can read the Python packages of this environment.

    Args:
        code (`str`):
            The Python code to be executed.
        timeout (`float`, defaults to `300`):
            The maximum time (in seconds) allowed for the code to run.
    """
    from agentscope.message import TextBlock
    from agentscope.tool import ToolResponse

    ended = await _run_in_sandbox(code, timeout, SandboxLimits())
    text = f"<returncode>{ended.returncode}</returncode><stdout>{ended.stdout}</stdout><stderr>{ended.stderr}</stderr>"
    return ToolResponse(content=[TextBlock(type="text", text=text)], metadata={"isolation": ended.isolation})


def sandbox_agentscope(*, enabled: bool) -> None:
    """Set whether AgentScope's `execute_python_code` runs in the sandbox when an episode calls it.

    This replaces the code of the function and not the function itself, so it also applies to earlier imports of the
    function. Its name, signature and docstring, which the model sees, do not change.
    """
    global _is_enabled  # noqa: PLW0603 AgentScope's function belongs to the whole process
    _is_enabled = enabled
    if _AGENTSCOPE in sys.modules:
        _replace_code(sys.modules[_AGENTSCOPE])
    elif not any(isinstance(finder, _AgentscopeFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AgentscopeFinder())


class _AgentscopeFinder(MetaPathFinder):
    """Replaces the function's code when AgentScope is imported. The import takes seconds, so it is not done earlier."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _AGENTSCOPE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _replace_code(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_code(module: types.ModuleType) -> None:
    global _execute_unsandboxed  # noqa: PLW0603 AgentScope's function belongs to the whole process
    if _execute_unsandboxed is not None:
        return
    function: Any = module.execute_python_code
    _execute_unsandboxed = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )

    async def execute_python_code(code: str, timeout: float = 300, **kwargs: Any) -> ToolResponse:
        from astuner.tools import _execute

        return await _execute(code, timeout, **kwargs)

    function.__code__ = execute_python_code.__code__


_AGENTSCOPE = "agentscope.tool"
_execute_unsandboxed: Any = None
_is_enabled = False


async def _execute(code: str, timeout: float, **kwargs: Any) -> ToolResponse:
    if _is_enabled and current_episode_processes() is not None:
        return await run_python(code, timeout)
    result: ToolResponse = await _execute_unsandboxed(code, timeout, **kwargs)
    return result


async def _run_in_sandbox(code: str, timeout: float, limits: SandboxLimits) -> _Ended:
    folder = tempfile.mkdtemp(prefix="astuner-sandbox-")
    report_read, report_write = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        report = stack.enter_context(os.fdopen(report_read, "rb"))
        with os.fdopen(report_write, "wb"):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_LAUNCHER)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(folder),
                cwd=folder,
                pass_fds=(report_write,),
                start_new_session=True,
            )
        stack.callback(_end, process)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        job = _job(code, timeout, folder, limits, report_write)
        output = [asyncio.ensure_future(_read(stream, limits.output)) for stream in (process.stdout, process.stderr)]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        error = await _wait(process, timeout, limits.memory)
        stdout, stderr = await asyncio.gather(*output)
        ended: dict[str, Any] = {}
        for line in report:
            ended |= json.loads(line)
    missing = None if ended.get("missing") is None else tuple(ended["missing"])
    _warn_of(missing or ())
    if error is not None:
        return _Ended(-1, stdout, f"{stderr}\n{error}" if stderr else error, missing)
    return _Ended(ended.get("returncode", -9), stdout, stderr, missing)


async def _wait(process: asyncio.subprocess.Process, timeout: float, memory: int) -> str | None:
    """Wait for the end of the sandbox, or end it; return why it was ended, or None if it exited."""
    ended = asyncio.ensure_future(process.wait())
    ends_at = time.monotonic() + timeout
    try:
        while not ended.done():
            left = ends_at - time.monotonic()
            if left <= 0:
                error = f"TimeoutError: The code execution exceeded the timeout of {timeout} seconds."
            elif _memory_of_processes(process.pid, memory) > memory:
                error = f"MemoryError: The processes of the code used more than {memory} bytes together."
            else:
                await asyncio.wait([ended], timeout=min(left, _MEMORY_POLL_SECONDS))
                continue
            _end(process)
            await ended
            return error
    finally:
        ended.cancel()
    return None


def _memory_of_processes(pid: int, enough: int) -> int:
    """Return the memory of a process and its descendants, in bytes; if it is at most `enough`, an upper bound."""
    root = find_process(pid)
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


def _job(code: str, timeout: float, folder: str, limits: SandboxLimits, report: int) -> dict[str, object]:
    cpu_seconds = min(limits.cpu_seconds, math.ceil(max(timeout, 0)) + 1)
    return {
        "code": code,
        "folder": folder,
        "env": _environment(folder),
        "python": sys.executable,
        "readable": [*_READABLE, *sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, *_package_folders()})],
        "limits": {**asdict(limits), "cpu_seconds": cpu_seconds},
        "report": report,
    }


def _package_folders() -> set[str]:
    """Return the folders of installed packages, which are not always below `sys.prefix`."""
    return {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}


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


async def _read(stream: asyncio.StreamReader, limit: int) -> str:
    """Read a stream to its end and keep the beginning."""
    kept, size = bytearray(), 0
    while chunk := await stream.read(_CHUNK_BYTES):
        size += len(chunk)
        kept += chunk[: limit - len(kept)]
    text = kept.decode("utf-8", errors="replace")
    return text if size <= limit else f"{text}\n[{size - limit} more bytes were cut]"


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


@cache
def _warn_of(missing: tuple[str, ...]) -> None:
    if missing:
        text = "; ".join(_MISSING[name] for name in missing)
        logger.warning("the sandbox of execute_python_code is incomplete on this machine: {}", text)
