"""A program in Python runs as with `python FILE`, in a fork of a server that ends with its process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from astuner.sandbox import run_python_program
from astuner.sandbox.fork_client import SandboxServer, server
from tests.sandbox.namespaces import needs_namespaces

PROGRAMS = {
    "exit code": "import sys; print(1); sys.exit(300)",
    "negative exit code": "raise SystemExit(-1)",
    "exit message": "import sys; sys.exit('a reason')",
    "exit of another type": "import sys; sys.exit(2.5)",
    "error": "def f(): raise ValueError('x')\nf()",
    "chained error": "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('y') from e",
    "syntax error": "print(1)\nx = = 2",
    "encoding": "# coding: iso-8859-15\nprint('é')",
    "hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__); 1 / 0",
    "unclosed file": "f = open('x', 'w'); f.write('text')\n"
    "import atexit; atexit.register(lambda: print(repr(open('x').read())))",
    "finalizer": "class A:\n    def __del__(self): print('del')\na = A()",
    "cycle with finalizer": "class A:\n    def __del__(self): print('del')\na = A(); a.a = a",
    "atexit in order": "import atexit; atexit.register(print, 1); atexit.register(print, 2)",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "daemon thread": "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
    "error in a thread": "import threading; threading.Thread(target=lambda: print(1 / 0), name='t').start()",
    "fork": "import os\nif os.fork(): os.wait(); print('parent')\nelse: print('child')",
    "forked process": "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    p = m.get_context('fork').Process(target=print, args=[1]); p.start(); p.join(); print(p.exitcode)",
    "spawn": "import multiprocessing as m\ndef f(): print('spawned', __name__)\nif __name__ == '__main__':\n"
    "    p = m.get_context('spawn').Process(target=f); p.start(); p.join(); print(p.exitcode)",
    "names of main": "print(__name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__)\n"
    "print(sorted(globals()))",
    "docstring": "'''A program.'''\nprint(__doc__)",
    "arguments and paths": "import sys; print(sys.argv, sys.path)",
    "annotations": "x: int = 3\nprint(__annotations__)",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nprint(A(1))",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "source": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
    "future": "print(f'{1!r}'); print(__import__('__future__').annotations.compiler_flag); x: undefined = 1",
    "modules": "import sys; print([n for n in sys.modules if 'sandbox' in n or 'server' in n or 'launcher' in n])",
    "random": "import random; random.seed(3); print(random.random())",
    "stdin": "import sys; print(repr(sys.stdin.read()), sys.stdin.isatty())",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(s.encoding, s.errors, s.line_buffering, s.write_through, s.seekable(), type(s.buffer).__name__, s.name)",
    "reconfigured": "import sys; sys.stdout.reconfigure(encoding='utf-8', errors='replace'); print('\\ud800é')",
    "closed stdout": "import sys; sys.stdout.close()",
    "no stdout": "import sys; sys.stdout = None; print(1)",
    "encodings": "import sys, locale; print(sys.stdout.encoding, locale.getpreferredencoding(), sys.flags.utf8_mode)",
    "recursion": "def f(): return f()\ntry: f()\nexcept RecursionError: print('deep')",
    "interrupt": "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)",
    "warning": "import warnings; warnings.warn('careful')",
    "exception group": "raise ExceptionGroup('g', [ValueError(1), KeyError(2)])",
    "note": "e = ValueError(1); e.add_note('n'); raise e",
    "asyncio": "import asyncio\nasync def f(): await asyncio.sleep(0); return 3\nprint(asyncio.run(f()))",
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_does_what_python_does_with_it(name: str, tmp_path: Path) -> None:
    code = PROGRAMS[name]
    (tmp_path / "program.py").write_text(code)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONIOENCODING"] = "utf-8"
    expected = subprocess.run(
        [sys.executable, "-u", "program.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=False,
    )
    ended = await run_python_program(code, 60)
    stdout, stderr = (
        text.decode().replace(str(tmp_path), "/tmp/sandbox") for text in (expected.stdout, expected.stderr)
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (expected.returncode, stdout, stderr)


async def test_an_isolated_program_reads_its_input_and_imports_no_module_of_its_folder() -> None:
    code = (
        "import sys\nprint(repr(input()), repr(sys.stdin.read()))\ntry: import other\nexcept ImportError: print('none')"
    )
    ended = await run_python_program(code, 60, files={"other.py": ""}, stdin="a\nb\n", isolated=True)
    assert (ended.returncode, ended.stdout) == (0, "'a' 'b\\n'\nnone\n"), ended.stderr


CAPABILITIES = """
import ctypes, subprocess, sys
def held():
    data = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
    return any(data)
print(held())
if sys.argv[1:] != ["again"]:
    print(subprocess.run([sys.executable, "program.py", "again"], capture_output=True, text=True).stdout)
"""


async def test_a_program_has_no_capabilities() -> None:
    assert (await run_python_program(CAPABILITIES, 60)).stdout.split() == ["False", "False"]


@needs_namespaces
def test_a_program_of_root_has_no_capabilities_without_namespaces() -> None:
    code = f"import asyncio\nfrom astuner.sandbox import run_python_program as run\nr = run({CAPABILITIES!r}, 60)"
    code += "\nprint(asyncio.run(r))"
    command = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    arguments = ["unshare", "--user", "--map-root-user", "sh", "-c", command, sys.executable, "-c", code]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "stdout='False\\nFalse\\n\\n'" in ended.stdout
    assert "missing=('processes',)" in ended.stdout


async def test_a_program_finds_nothing_of_earlier_ones() -> None:
    await run_python_program("secret = 'earlier'", 60, files={"tests.txt": "hidden answer"})
    code = "import gc; print([o for o in gc.get_objects() if type(o) is dict and 'tests.txt' in o], gc.isenabled())"
    assert (await run_python_program(code, 60)).stdout == "[] True\n"


async def test_a_server_that_was_killed_is_replaced() -> None:
    await run_python_program("", 60)
    first = server._process
    assert first is not None
    running = asyncio.create_task(run_python_program("import time; time.sleep(60)", 60))
    await asyncio.sleep(0.3)
    os.kill(first.pid, signal.SIGKILL)
    assert (await running).returncode == -9  # its sandboxes end with it
    assert (await run_python_program("print(1)", 60)).stdout == "1\n"
    assert server._process is not None
    assert server._process.pid != first.pid


def test_the_server_and_its_programs_end_when_their_process_is_killed() -> None:
    code = """
import asyncio, os, signal
from astuner.sandbox import run_python_program
from astuner.sandbox.fork_client import server
async def main():
    call = asyncio.create_task(run_python_program("import time; time.sleep(600)", 600))
    await asyncio.sleep(1)
    if os.fork() == 0:
        import time; time.sleep(4); os._exit(0)  # a fork does not keep the server
    print(server._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.wait()
    ends_at = time.monotonic() + 3
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    process.stdout.close()


def test_a_fork_starts_a_server_of_its_own() -> None:
    asyncio.run(run_python_program("", 60))
    owner = server._process
    assert owner is not None
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, asyncio.run(run_python_program("print(2)", 60)).stdout.encode())
        server.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"2\n"
    os.close(reader)
    os.close(writer)
    assert owner.poll() is None
    assert asyncio.run(run_python_program("print(1)", 60)).stdout == "1\n"


def test_a_server_can_be_closed_and_started_again() -> None:
    own = SandboxServer()
    own.close()
    own.end(0)
    assert own._process is None
