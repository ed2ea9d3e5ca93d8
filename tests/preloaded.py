"""Python processes that fork from a server with the imports, which cost five seconds of processor time otherwise.

All test processes of a session share the server. It ends with the last of them. A variable of the environment that is
read by an import, such as HF_HOME, does not act in a fork. Tests of the interpreter's start and end, of debuggers and
of the installed command start a real `python`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_PRELOADED = [
    *("astuner.cli.main", "astuner.launcher.launch", "astuner.launcher.run_result", "astuner.viewer.transcripts"),
    *("astuner.backbone.local.backbone", "astuner.diagnostics.monitor", "astuner.run_record.plots"),
    *("astuner.backbone.episode_workers.fork_server", "astuner.backbone.episode_workers.process"),
    *("astuner.workflows.agent_loop", "astuner.env_service.client", "astuner.task_judge.math_answer_as_judge"),
    *("agentscope.agent", "agentscope.model", "agentscope.tool", "openai", "torch"),
    *("transformers:AutoModelForCausalLM", "transformers:AutoTokenizer", "transformers:PreTrainedTokenizerFast"),
    *("transformers.models.qwen3.modeling_qwen3", "renderers.gpt_oss", "openai_harmony"),
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg"),
    *("tensorboard.compat.proto.summary_pb2", "tensorboard.summary.writer.record_writer"),
]
NO_PLOTS = "builtins:id"  # gets a run's folder instead of `plot_run`
_NUMBER = struct.Struct("q")
_ROOT = Path(__file__).parents[1]


class PythonProcess:
    """A process that runs `python ARGUMENTS`, with the methods of `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: str | Path,
        stdout: IO[Any],
        stderr: IO[Any] | None = None,
        stdin: IO[Any] | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        """Start it.

        Args:
            arguments: a script, `-m` and a module, or `-c` and code; then the arguments of that.
            stdout: file of its stdout.
            stderr: file of its stderr; `stdout` if None.
            stdin: file of its stdin; an empty one if None.
            cwd: working folder; this process's if None.
            env: its environment; this process's if None.
            start_new_session: whether it leads a new session.
        """
        self.arguments = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        keep_server()
        self._connection = _new_connection()
        request = {
            "arguments": self.arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
        }
        content = json.dumps(request).encode()
        with open(os.devnull, "rb") as nothing:
            files = [(stdin or nothing).fileno(), stdout.fileno(), (stderr or stdout).fileno()]
            socket.send_fds(self._connection, [_NUMBER.pack(len(content))], files)
        self._connection.sendall(content)
        self.pid = self._number()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code: the negative number of the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            readable, _, _ = select.select([self._connection], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired(["python", *self.arguments], timeout or 0.0)
            self.returncode = self._number()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        content = _received(self._connection, _NUMBER.size)
        if len(content) < _NUMBER.size:
            raise RuntimeError("the server that forks processes has ended")
        return int(_NUMBER.unpack(content)[0])


class AstunerProcess(PythonProcess):
    """A process of the command `astuner`."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        output: IO[Any],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        """Start it; `output` is the file of its stdout and stderr."""
        command = ("-m", "astuner", *arguments)
        super().__init__(*command, stdout=output, cwd=cwd, env=env, start_new_session=start_new_session)


def run_python(
    *arguments: str | Path,
    input: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` with `input` as its stdin, and return its exit code and what it printed.

    Raises:
        subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(input.encode())
        stdin.seek(0)
        process = PythonProcess(*arguments, stdout=stdout, stderr=stderr, stdin=stdin, cwd=cwd, env=env)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(process.arguments, process.wait(), *texts)


def run_astuner(
    *arguments: str | Path,
    input: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `astuner ARGUMENTS` as `run_python` does."""
    return run_python("-m", "astuner", *arguments, input=input, cwd=cwd, env=env, timeout=timeout)


def interpreter() -> tuple[str, ...]:
    """Return a command that runs a Python script, as `forking.interpreter` does, in a fork from the server."""
    keep_server()
    return _interpreter(_address())


def _interpreter(address: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", str(Path(__file__).with_name("preloaded_client.py")), address[1:])


_held: list[socket.socket] = []
"""A connection that keeps the server until this process ends."""


def keep_server() -> None:
    """Start the server, if no process of the session has, and keep it until this process ends."""
    if not _held:
        _held.append(_first_connection())
        atexit.register(_held[0].close)


def _address() -> str:
    """Return an address in Linux's abstract namespace: no file is left, and only one process can bind it."""
    return "\0" + os.environ.setdefault("ASTUNER_TESTS_SERVER", f"astuner-tests-{os.getpid()}")


def _new_connection() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address())
    except BaseException:
        connection.close()
        raise
    return connection


def _first_connection() -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):  # there is none
            return _new_connection()
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(_address())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # another process starts it
            listener.listen()
            listener.set_inheritable(True)
            command = [sys.executable, "-P", __file__, str(listener.fileno())]
            os.waitpid(os.posix_spawn(sys.executable, command, os.environ), 0)
            return _new_connection()


def _received(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size and (part := connection.recv(size - len(content))):
        content += part
    return content


class _Server:
    """Forks a process for each request, and sends its number and, when it has ended, its exit code."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, ended = socket.socketpair()
        for each in (listener, self._wakeup, ended):
            each.setblocking(False)
        self._sockets = {listener, self._wakeup, ended}
        self._listener = listener
        self._processes: dict[int, socket.socket] = {}
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wakeup socket is written
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(ended.fileno())
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the last client has ended."""
        own = len(self._sockets)
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    accepted, _ = connection.accept()
                    self._sockets.add(accepted)
                    self._selector.register(accepted, selectors.EVENT_READ)
                elif connection is self._wakeup:
                    connection.recv(4096)
                    self._report_ended()
                else:
                    self._read(connection)
                    if len(self._sockets) == own:
                        return

    def _read(self, connection: socket.socket) -> None:
        files: list[int] = []
        with contextlib.suppress(ConnectionResetError):
            size, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            content = _received(connection, *_NUMBER.unpack(size)) if size and uid == os.getuid() else b""
            if content and len(content) == _NUMBER.unpack(size)[0]:  # the client may have been killed meanwhile
                request = json.loads(content)
                pid = os.fork()
                if pid == 0:
                    self._become_process(request, files)
                self._processes[pid] = connection
                self._send(connection, pid)
                for file in files:
                    os.close(file)
                return
        for file in files:
            os.close(file)
        self._selector.unregister(connection)
        self._sockets.remove(connection)
        connection.close()

    def _report_ended(self) -> None:
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._send(self._processes.pop(pid), os.waitstatus_to_exitcode(status))

    @staticmethod
    def _send(connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # the client has ended
            connection.sendall(_NUMBER.pack(number))

    def _become_process(self, request: dict[str, Any], files: list[int]) -> None:
        code = 1
        try:
            from astuner.system import forking

            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            # A run whose services have threads starts an interpreter for its fork server.
            forking.interpreter = _interpreter(self._listener.getsockname().decode())
            for each in self._sockets:
                each.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
            for file in files:
                os.close(file)
            # Not those of the server, which may be able to seek.
            sys.stdout = open(1, "w", errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, errors=sys.stderr.errors, closefd=False)  # noqa: SIM115
            code = _run(**request)
        finally:
            os._exit(code)


def _run(arguments: list[str], cwd: str, env: dict[str, str], start_new_session: bool) -> int:
    """Become `python ARGUMENTS`, and return the exit code."""
    if start_new_session:
        os.setsid()
    os.chdir(cwd)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    kind = arguments[0]
    first = {"-m": cwd, "-c": ""}.get(kind, os.path.dirname(os.path.abspath(kind)))
    paths = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in (*paths, *inherited))]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        return _code_of(main, kind, arguments)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _code_of(main: types.ModuleType, kind: str, arguments: list[str]) -> int:
    try:
        if kind == "-m":
            sys.argv = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            sys.argv = arguments if kind != "-c" else ["-c", *arguments[2:]]
            text, name = (arguments[1], "<string>") if kind == "-c" else (Path(kind).read_text(), os.path.abspath(kind))
            if kind != "-c":
                main.__file__ = name
            exec(compile(text, name, "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    if os.fork():  # the server is no child of a test process
        os._exit(0)
    with open(os.devnull, "rb") as _nothing:
        os.dup2(_nothing.fileno(), 0)
    os.setsid()  # a signal to the process group of the tests is not for the server
    sys.path.insert(0, str(_ROOT))  # not another checkout, which may be installed
    for _name in _PRELOADED:
        with contextlib.suppress(ImportError):
            pkgutil.resolve_name(_name)
    # Transformers compiles its conversions, and Hydra imports its plugins and grammar, at the first use.
    with contextlib.suppress(ImportError, AttributeError):  # older versions have none
        pkgutil.resolve_name("transformers.conversion_mapping:get_checkpoint_conversion_mapping")("qwen3")
    _yaml = _ROOT / "tutorial/example_math_agent/math_agent_tiny.yaml"
    pkgutil.resolve_name("astuner.config.loading:load_config")(_yaml)
    pkgutil.resolve_name("astuner.doors:DOORS")["record"]["plots"] = NO_PLOTS
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _Server(_listener).serve()
    os._exit(0)  # the end of an interpreter with these modules takes a second
