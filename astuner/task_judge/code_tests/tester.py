"""Runs the tests of a solution. Executed by path in a sandbox, with the standard library only.

The file `job.json` has the tests and a random nonce; it is removed before the solution runs. The solution runs in a
child process (see `solution_host`), which has neither the tests nor this process's output. Each line of output is the
nonce and JSON: `tests`, their names; `test`, `passed` and `why` for each; `failed` if the solution cannot be imported;
`invalid` if the tests cannot.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import ctypes
import inspect
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
import types
import unittest
from collections.abc import Callable
from typing import Any

_MAX_FRAME = 16 * 2**20
_MAX_WHY = 300
_PR_SET_DUMPABLE = 4


class SolutionEnded(Exception):
    """The process of the solution has ended, or was ended because it was too slow or sent too much."""


class Solution:
    """The process of the solution."""

    def __init__(self, test_timeout: float) -> None:
        self.test_timeout = test_timeout
        self.ends_at = math.inf
        self.process: subprocess.Popen[bytes] | None = None
        self.names: list[str] = []
        self.failed = ""

    def start(self) -> None:
        """Start the process, and import the solution.

        Raises:
            SolutionEnded: the solution cannot be imported.
        """
        if self.failed:
            raise SolutionEnded(self.failed)
        self.ends_at = time.monotonic() + self.test_timeout
        requests_read, self.requests = os.pipe()
        self.answers, answers_write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "solution_host.py", str(requests_read), str(answers_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(requests_read, answers_write),
            start_new_session=True,
        )
        os.close(requests_read)
        os.close(answers_write)
        try:
            answer = self._receive()
        except SolutionEnded as error:
            self.failed = f"importing the solution: {error}"
            raise SolutionEnded(self.failed) from None
        if not isinstance(answer.get("names"), list):
            self.failed = f"importing the solution raised {answer.get('failed')}"
            raise SolutionEnded(self.failed)
        self.names = [name for name in answer["names"] if isinstance(name, str)]

    def request(self, operation: str, *arguments: object, number: int = 0, **named: object) -> Any:
        """Return the result of an operation in the solution's process.

        Raises:
            SolutionEnded: the process has ended.
            Exception: the exception of the solution, as the nearest built-in exception.
        """
        if self.process is None:
            self.start()
        encoded = [_encode(argument) for argument in arguments]
        self._send(
            {
                "operation": operation,
                "object": number,
                "arguments": encoded,
                "named": {name: _encode(argument) for name, argument in named.items()},
            }
        )
        answer = self._receive()
        if "error" in answer:
            raise _exception(answer)
        for argument, changed in zip(arguments, answer.get("changed") or (), strict=False):
            _update(argument, None if changed is None else self._decode(changed))
        return self._decode(answer.get("result"))

    def end(self, why: str) -> SolutionEnded:
        """End the process, and return the error for the test."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        for descriptor in (self.requests, self.answers):
            os.close(descriptor)
        self.process = None
        return SolutionEnded(why or f"the solution ended its process with code {code}")

    def _send(self, message: object) -> None:
        data = json.dumps(message).encode()
        data = struct.pack(">I", len(data)) + data
        try:
            while data:
                _, ready, _ = select.select([], [self.requests], [], max(self.ends_at - time.monotonic(), 0))
                if not ready:
                    raise self.end(f"timeout: the test took longer than {self.test_timeout:g} s")
                data = data[os.write(self.requests, data[:4096]) :]
        except BrokenPipeError:
            raise self.end("") from None

    def _receive(self) -> Any:
        (length,) = struct.unpack(">I", self._read(4))
        if length > _MAX_FRAME:
            raise self.end("the solution returned too much")
        try:
            answer = json.loads(self._read(length))
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.end("the solution returned no valid result")
        return answer

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            ready, _, _ = select.select([self.answers], [], [], max(self.ends_at - time.monotonic(), 0))
            if not ready:
                raise self.end(f"timeout: the test took longer than {self.test_timeout:g} s")
            chunk = os.read(self.answers, min(count - len(data), 65536))
            if not chunk:
                raise self.end("")
            data += chunk
        return data

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict) or not value:
            return None if isinstance(value, list | dict) else value
        ((kind, content), *_) = value.items()
        if kind == "object":
            return Proxy(self, content)
        if kind == "dict":
            return {self._decode(key): self._decode(item) for key, item in content}
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self._decode(item) for item in content)
        return bytes.fromhex(content) if kind == "bytes" else complex(*content)


class Proxy:
    """An object of the solution. It equals no plain value, whatever the solution says."""

    def __init__(self, solution: Solution, number: int) -> None:
        self.__dict__["_solution"], self.__dict__["_number"] = solution, number

    def __call__(self, *arguments: object, **named: object) -> Any:
        """Call the object in the process of the solution."""
        return self._solution.request("call", *arguments, number=self._number, **named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self._solution.request("eq", self, other) is True

    def __getattr__(self, name: str) -> Any:
        return self._solution.request("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._solution.request("setattr", self, name, value)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and self._solution.request("isinstance", instance, self) is True

    def __exit__(self, *error: object) -> None:
        self._solution.request("exit", self)

    __hash__ = object.__hash__


def _operation(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._solution.request(name, self, *arguments)


_PROXIED = ("lt", "le", "len", "bool", "str", "repr", "iter", "next", "contains", "getitem", "setitem", "delitem")
for _name in (*_PROXIED, "add", "sub", "mul", "truediv", "neg", "int", "float", "enter"):
    setattr(Proxy, f"__{_name}__", _operation(_name))


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [_encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if kind in (bytes, complex):
        return {kind.__name__: value.hex() if kind is bytes else [value.real, value.imag]}
    if isinstance(value, Proxy):
        return {"object": value._number}
    if kind is range:
        return _encode(list(value))
    raise TypeError(f"tests can only pass plain values to the solution, not {kind.__name__}")


def _update(argument: Any, changed: Any) -> None:
    if type(argument) is list and type(changed) is list:
        argument[:] = changed
    elif type(argument) in (dict, set) and type(changed) is type(argument):
        argument.clear()
        argument.update(changed)


def _exception(answer: dict[str, Any]) -> Exception:
    names, message = answer["error"], str(answer.get("message"))
    for name in names if isinstance(names, list) else ():
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # such as UnicodeDecodeError, which has other arguments
                return kind(message)
    return RuntimeError(message)


class SolutionModule(types.ModuleType):
    """The module `solution` of the tests."""

    def __init__(self, solution: Solution) -> None:
        super().__init__("solution")
        self.__dict__["_solution"] = solution

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._solution.process is None:
            self._solution.start()
        if name not in self._solution.names:
            raise AttributeError(f"the solution has no {name}")
        value = self._solution.request("getattr", _MODULE, name)
        return FromModule(self._solution, name) if isinstance(value, Proxy) else value


class FromModule(Proxy):
    """A name in the module of the solution, looked up at each use because the process may have been restarted."""

    def __init__(self, solution: Solution, name: str) -> None:
        self.__dict__["_solution"], self.__dict__["_name"] = solution, name

    @property
    def _number(self) -> int:
        if self._solution.process is None:
            self._solution.start()
        found = self._solution.request("getattr", _MODULE, self._name)
        return found._number if isinstance(found, Proxy) else -1


_MODULE: Any = Proxy(None, 0)  # type: ignore[arg-type]


def collect(
    tree: ast.Module, entry_point: str | None, namespace: dict[str, Any]
) -> list[tuple[str, Callable[[], Any]]]:
    """Run the definitions of the tests, and return the tests by name.

    The tests are each `assert` in the module, with the statements before it, the functions `test_…`, and the methods of
    `unittest.TestCase`s; without any, `check(candidate)`, as in HumanEval.
    """
    tests: list[tuple[str, Callable[[], Any]]] = []
    statements: list[ast.stmt] = []
    for node in tree.body:
        statements.append(node)
        if isinstance(node, ast.Assert):
            tests.append((ast.unparse(node)[:100], _of_statements(statements, namespace)))
            statements = []
    if not tests:
        _of_statements(statements, namespace)()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            tests.append((node.name, _of_function(node.name, namespace)))
        elif isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            tests += [(f"{node.name}.{m}", _of_case(node.name, m, namespace)) for m in methods if m.startswith("test")]
    if not tests and entry_point and "check" in namespace:
        tests = [("check", lambda: namespace["check"](getattr(namespace["solution"], entry_point)))]
    return tests


def needs_arguments(tree: ast.Module) -> list[str]:
    """Return the test functions that have parameters without a default, which only pytest can call."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [node for node in functions if node.name.startswith("test")]
    return [node.name for node in tests if len(node.args.args) > len(node.args.defaults)]


def _of_statements(statements: list[ast.stmt], namespace: dict[str, Any]) -> Callable[[], None]:
    code = compile(ast.Module(statements, []), "tests", "exec")
    return lambda: exec(code, namespace)


def _of_function(name: str, namespace: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        result = namespace[name]()
        if inspect.iscoroutine(result):
            asyncio.run(result)

    return run


def _of_case(name: str, method: str, namespace: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        result = unittest.TestResult()
        namespace[name](method).run(result)
        if not result.wasSuccessful() or result.skipped or result.testsRun != 1:
            faults = [text for _, text in (*result.errors, *result.failures, *result.skipped)]
            raise AssertionError(faults[0].strip().rpartition("\n")[2] if faults else "it did not run")

    return run


def main() -> None:
    """Run the tests of `job.json`."""
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    os.unlink("job.json")
    with contextlib.suppress(OSError, AttributeError):  # Linux only; the solution cannot read this process's memory
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    out = sys.stdout
    sys.stdout = sys.stderr

    def report(message: object) -> None:
        out.write(f"{job['nonce']} {json.dumps(message)}\n")
        out.flush()

    solution = Solution(job["test_timeout"])
    module = SolutionModule(solution)
    sys.modules["solution"] = module
    try:
        trees = [ast.parse(source) for source in job["tests"]]
    except (SyntaxError, ValueError, RecursionError) as error:
        report({"invalid": f"{type(error).__name__}: {error}"})
        return
    if uncallable := [name for tree in trees for name in needs_arguments(tree)]:
        report({"invalid": f"these tests have parameters, which only pytest can give: {', '.join(uncallable)}"})
        return
    report({"started": True})
    tests: list[tuple[str, Callable[[], Any]]] = []
    try:
        solution.start()
        _MODULE.__dict__["_solution"] = solution
        # A name of the solution must not replace a built-in function that the tests use, such as `all`.
        names = [name for name in solution.names if not (name.startswith("_") or hasattr(builtins, name))]
        for tree in trees:
            namespace = {name: getattr(module, name) for name in names}
            namespace |= {"solution": module, "__name__": "tests"}
            tests += collect(tree, job["entry_point"], namespace)
    except Exception as error:
        report({"failed": f"{type(error).__name__}: {error}"[:_MAX_WHY] if not solution.failed else solution.failed})
        return
    report({"tests": [name for name, _ in tests]})
    for number, (_, test) in enumerate(tests):
        solution.ends_at = time.monotonic() + solution.test_timeout
        why = ""
        try:
            test()
        except BaseException as error:  # whatever a test raises, it has failed
            why = str(error) if isinstance(error, SolutionEnded) else f"{type(error).__name__}: {error}".rstrip(": ")
        report({"test": number, "passed": not why, "why": why[:_MAX_WHY]})


if __name__ == "__main__":
    main()
