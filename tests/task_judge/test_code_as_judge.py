"""The judge for code: right and wrong code, limits, and code that tries to pass without solving the task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.code_as_judge import CodeAsJudge, extract_code

CONFIG = TaskJudgeConfig(timeout=600)
ADD = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
RIGHT = "def add(a, b):\n    return a + b"


def judged(code: str, tests: Any = ADD, entry_point: str | None = None, **params: Any) -> Judgement:
    params = {"test_timeout": 60, "timeout": 300} | params
    task = WorkflowTask(Task("t", "?", metadata={"tests": tests, "entry_point": entry_point}), episode_id="e")
    judge = CodeAsJudge(CONFIG, **params)
    output = WorkflowOutput(metadata={"final_answer": f"```python\n{code}\n```"})
    return asyncio.run(judge.compute_reward(task, output))


STACK = """
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise IndexError("empty")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __eq__(self, other):
        return isinstance(other, Stack) and self.items == other.items
LIMIT = 3
def squares(n):
    for i in range(n):
        yield i * i
def sort_in_place(values):
    values.sort()
async def late():
    return 1
"""
STACK_TESTS = """
import unittest
from solution import LIMIT, Stack, sort_in_place
import solution

def test_objects():
    stack = Stack([1]).push(2)
    assert len(stack) == 2 and list(stack) == [1, 2] and isinstance(stack, Stack)
    assert stack.pop() == 2 and stack.items == [1]
    assert stack == Stack([1]) and stack != Stack([2]) and stack != [1]

def test_errors():
    try:
        Stack().pop()
    except IndexError as error:
        assert str(error) == "empty"
    else:
        raise AssertionError

def test_values():
    values = [3, 1, 2]
    sort_in_place(values)
    assert values == [1, 2, 3] and LIMIT == 3 and list(solution.squares(3)) == [0, 1, 4]

class Cases(unittest.TestCase):
    def test_pop(self):
        with self.assertRaises(IndexError):
            Stack().pop()

    def test_wrong(self):
        self.assertEqual(LIMIT, 4)

    @unittest.skip("no")
    def test_skipped(self):
        pass
"""


def test_tests_of_functions_and_classes_see_the_objects_of_the_solution() -> None:
    result = judged(STACK, STACK_TESTS)
    assert result.explanation == "4 of 6 tests passed; Cases.test_wrong: AssertionError: AssertionError: 3 != 4"
    assert (result.reward, result.is_success) == (pytest.approx(4 / 6), False)
    assert result.components == {"tests_passed": pytest.approx(4 / 6)}


def test_asserts_run_in_order_with_the_statements_before_them() -> None:
    tests = "total = add(1, 1)\nassert total == 2\ntotal = add(total, 1)\nassert total == 3\nassert total == 4"
    result = judged(RIGHT, tests)
    assert (result.reward, result.explanation) == (
        pytest.approx(2 / 3),
        "2 of 3 tests passed; assert total == 4: AssertionError",
    )
    assert judged(RIGHT, tests, all_or_nothing=True).reward == 0.0
    assert judged(RIGHT, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]).reward == 1.0


def test_human_eval_form() -> None:
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert judged(RIGHT, check, "add").reward == 1.0
    wrong = judged("def add(a, b):\n    return a - b", check, "add")
    assert (wrong.reward, wrong.is_success) == (0.0, False)


def test_programs_are_compared_by_output() -> None:
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}, {"input": "", "output": "0"}]
    result = judged("import sys\nwords = sys.stdin.read().split()\nprint(int(words[0]) + int(words[1]), ' ')", pairs)
    assert result.reward == pytest.approx(2 / 3)
    assert "input 3: exit code 1; IndexError: list index out of range" in result.explanation
    result = judged("print(3)", pairs[:2])
    assert (result.reward, result.is_success) == (0.5, False)
    assert result.explanation == r"1 of 2 tests passed; input 2: the output is '3\n', not '10'"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def add(a, b):\n    return a + b + 1", "AssertionError"),
        ("def add(a, b) return", "importing the solution raised SyntaxError"),
        (
            "import no_such_module",
            "importing the solution raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("x = 1", "NameError: name 'add' is not defined"),
        ("def add(a, b):\n    return bytearray(2**40)", "MemoryError"),
        ("", "NameError"),
    ],
)
def test_wrong_code(code: str, why: str) -> None:
    result = judged(code)
    assert (result.reward, result.is_success) == (0.0, False)
    assert why in result.explanation


ALWAYS_EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
class Number(int):
    __eq__ = lambda self, other: True
def add(a, b): return Any() if a > 0 else Number(7)
"""
FORGES_REPORTS = """
import json, os, sys
for line in ("{}", '{"started": true}', '{"tests": ["a"]}', '{"test": 0, "passed": true, "why": ""}'):
    print("0" * 32, line, flush=True)
    for descriptor in range(1, 64):
        try: os.write(descriptor, ("0" * 32 + " " + line + chr(10)).encode())
        except OSError: pass
"""
READS_TESTS = """
import os, glob
found = ""
for name in [*glob.glob("**", recursive=True), "job.json", f"/proc/{os.getppid()}/environ", f"/proc/{os.getppid()}/mem",
             f"/proc/{os.getppid()}/cmdline", f"/proc/{os.getppid()}/fd/1"]:
    try: found += open(name, errors="replace").read(100_000)
    except (OSError, ValueError): pass
def add(a, b):
    return {1: 3, -1: 0}[a] if "secret_of_" + "the_tests" in found else 0
"""
SHADOWS = """
import builtins, sys, unittest
class AssertionError(Exception): pass
def all(values): return True
def len(value): return 3
unittest.TestCase.assertEqual = lambda *args: None
builtins.AssertionError = AssertionError
for name in ("random", "unittest", "json", "string"):
    open(name + ".py", "w").write("import os; os._exit(0)")
open("tester.py", "w").write("")
open("job.json", "w").write('{"nonce": "", "tests": ["assert True"]}')
def add(a, b): return 0
"""


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return a + b + 1",
        "import os, signal; os.kill(os.getppid(), signal.SIGINT)\ndef add(a, b): return a + b + 1",
        ALWAYS_EQUAL,
        FORGES_REPORTS,
        READS_TESTS,
        SHADOWS,
        "print('x' * 10**8)\ndef add(a, b): return 'x' * 10**8",
        "def add(a, b): return ['x' * 1000] * 20_000",
        "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    ],
    ids=[
        *("exits", "_exits", "_exits in the test", "SystemExit", "kills the tests", "interrupts the tests"),
        *("always equal", "forges reports", "reads the tests", "shadows", "long output", "large result", "deep result"),
    ],
)
def test_code_cannot_pass_without_the_right_results(code: str) -> None:
    tests = (
        "import random, string, unittest\n# secret_of_the_tests\n"
        "class Cases(unittest.TestCase):\n    def test_add(self): self.assertEqual(solution.add(1, 2), 3)\n"
        "def test_add(): assert all([add(1, 2) == 3, add(-1, 1) == 0, len([1]) == 1])\n"
    )
    result = judged(code, tests)
    assert (result.reward, result.is_success) == (0.0, False), result.explanation


def test_a_crash_or_an_endless_loop_fails_its_own_test_only() -> None:
    code = "import os\ndef add(a, b):\n    if a == 1: os._exit(3)\n    while a == 2: pass\n    return a + b"
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(3, 2) == 5"]
    result = judged(code, tests, test_timeout=4)
    assert (result.reward, result.is_success) == (pytest.approx(1 / 3), False)
    assert "assert add(1, 2) == 3: the solution ended its process with code 3" in result.explanation
    assert "timeout: the test took longer than 1 s" in judged(code, tests[1], test_timeout=1).explanation


def test_processes_and_time_are_bounded() -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = judged(bomb, test_timeout=1, timeout=2)
    assert (result.reward, result.is_success) == (0.0, False)
    assert "timeout" in result.explanation
    endless = judged("while True: pass", [{"input": "", "output": "1"}] * 3, test_timeout=1, timeout=1.5)
    assert (endless.reward, "timeout" in endless.explanation) == (0.0, True)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("assert add(1, 2 == 3", "cannot be run: SyntaxError"),
        ("x = 1", "has no tests"),
        ("def test_add(tmp_path): pass", "cannot be run: these tests have parameters, .*: test_add"),
        ([], "expected Python source"),
        (3, "expected Python source"),
        ([{"input": "1"}], "expected Python source"),
    ],
)
def test_invalid_tests_are_errors_of_the_task(tests: Any, why: str) -> None:
    with pytest.raises(JudgeError, match=rf"'tests' in the metadata of task t .*{why}"):
        judged(RIGHT, tests)


def test_time_limits_must_be_shorter_than_the_timeout_of_the_judge() -> None:
    with pytest.raises(ValueError, match="each must be shorter than the next"):
        CodeAsJudge(TaskJudgeConfig(timeout=10))


def test_code_is_the_last_block() -> None:
    assert extract_code("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\n```json\n{}\n```") == "y = 2\n"
    assert extract_code("```py\nx = 1") == "x = 1"
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("```bash\nls\n```") == "```bash\nls\n```"
