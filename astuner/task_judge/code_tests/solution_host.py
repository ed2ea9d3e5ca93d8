"""Runs a solution and answers the calls of the tests. Executed by path in a sandbox, with the standard library only.

The tests run in another process (see `tester`), so the solution cannot change them. Frames of JSON go through two
pipes. Plain values are copied; any other object stays here, and the tests have a number that stands for it.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import struct
import sys
from typing import Any

OPERATIONS = {
    "eq": operator.eq, "lt": operator.lt, "le": operator.le, "hash": hash, "len": len, "bool": bool, "str": str,
    "repr": repr, "iter": iter, "next": next, "contains": operator.contains, "getitem": operator.getitem,
    "setitem": operator.setitem, "delitem": operator.delitem, "add": operator.add, "sub": operator.sub,
    "mul": operator.mul, "truediv": operator.truediv, "neg": operator.neg, "int": int, "float": float,
    "getattr": getattr, "setattr": setattr, "isinstance": isinstance, "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
}  # fmt: skip


def send(descriptor: int, message: object) -> None:
    """Write a frame."""
    data = json.dumps(message).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """Read a frame; exit at the end of the pipe."""
    (length,) = struct.unpack(">I", _read(descriptor, 4))
    return json.loads(_read(descriptor, length))


def _read(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(descriptor, count - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


class SolutionHost:
    """The objects of the solution that the tests know, by number; 0 is its module."""

    def __init__(self, module: object) -> None:
        self.objects: list[object] = [module]

    def encode(self, value: Any) -> Any:
        """Return a value as JSON: plain values with their type, and a number for any other object."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind is dict:
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind in (bytes, complex):
            return {kind.__name__: value.hex() if kind is bytes else [value.real, value.imag]}
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def decode(self, value: Any) -> Any:
        """Return the value of JSON that the tests have sent."""
        if not isinstance(value, dict):
            return value
        ((kind, content), *_) = value.items()
        if kind == "object":
            return self.objects[content]
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind in ("bytes", "complex"):
            return bytes.fromhex(content) if kind == "bytes" else complex(*content)
        return getattr(builtins, kind)(self.decode(item) for item in content)

    def answer(self, request: Any) -> Any:
        """Carry out a request of the tests."""
        arguments = [self.decode(argument) for argument in request["arguments"]]
        named = {name: self.decode(argument) for name, argument in request["named"].items()}
        is_call = request["operation"] == "call"
        function: Any = self.objects[request["object"]] if is_call else OPERATIONS[request["operation"]]
        try:
            result = function(*arguments, **named)
            # Lists, dicts and sets are copied, so what the solution has changed in them is sent back.
            changed = [self.encode(a) if type(a) in (list, dict, set) else None for a in arguments]
            return {"result": self.encode(result), "changed": changed}
        except Exception as error:
            return {"error": [kind.__name__ for kind in type(error).__mro__], "message": str(error)[:1000]}


def main() -> None:
    """Import `solution.py`, then answer requests until the pipe is closed."""
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    import types

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        with open("solution.py", encoding="utf-8") as file:
            exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    except Exception as error:
        send(answers, {"failed": f"{type(error).__name__}: {error}"[:1000]})
        return
    send(answers, {"names": [name for name in module.__dict__ if not name.startswith("__")]})
    host = SolutionHost(module)
    while True:
        send(answers, host.answer(receive(requests)))


if __name__ == "__main__":
    main()
