"""Runs a file of Python code in an interpreter that has run none. Imports the standard library only."""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def run(arguments: list[str], env: dict[str, str], *, is_isolated: bool) -> NoReturn:
    """Run a file as `python -u FILE` does, or `python -I FILE`, and exit.

    Args:
        arguments: the name of a file in the working directory, and its arguments.
        env: all environment variables.
    """
    folder = os.getcwd()
    path = f"{folder}/{arguments[0]}"
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.orig_argv, sys.dont_write_bytecode = arguments, [sys.executable, *arguments], True
    sys.path[:1] = [] if is_isolated else [folder]  # instead of "", that of `python -c`
    _open_streams(is_buffered=is_isolated)
    for name in ("fork_server", "program_launcher", "python_program"):
        del sys.modules[name]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __builtins__=builtins, __loader__=loader)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    code: object = None
    try:
        with open(path, "rb") as file:
            compiled = compile(file.read(), path, "exec", dont_inherit=True)
        exec(compiled, vars(main))
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # whatever a program raises, Python prints it
        code = 1
        own = error.__traceback__
        assert own is not None
        sys.excepthook(type(error), error.with_traceback(own.tb_next), own.tb_next)
    _exit(main, code)


def _open_streams(*, is_buffered: bool) -> None:
    """Open the standard streams again, which were opened on other files, such as ones that can seek."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw.name = f"<{name}>"
        stream: io.TextIOWrapper
        if name == "stdin":
            stream = io.TextIOWrapper(io.BufferedReader(raw), old.encoding, old.errors, write_through=True)
        elif name == "stdout" and is_buffered:
            stream = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, "\n")
        else:
            stream = io.TextIOWrapper(raw, old.encoding, old.errors, "\n", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _exit(main: types.ModuleType, code: object) -> NoReturn:
    """Do what Python does at its end, but do not take apart its modules, which takes longer than most programs."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    vars(main).clear()  # files that it has not closed are written, and its objects are finalized
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit((code or 0) & 0xFF)
