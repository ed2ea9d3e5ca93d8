"""The judge for code, which runs unit tests or programs in the sandbox."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError, SandboxError, UnscoredError, short_repr, shorten
from astuner.sandbox import SandboxLimits, SandboxResult, run_python_program
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge, answer_text, of_task, task_value

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_FOLDER = Path(__file__).parent / "code_tests"
_REPORT_BYTES = 4 * 2**20
_MAX_WHY = 300


class CodeAsJudge(BaseJudge):
    """Tests the code in the answer; the reward is the fraction of the tests that pass.

    The code is the last fenced code block that is Python's or has no language, else the whole answer. `tests` in the
    task's metadata is one of:

    - Python source, or a list of sources: each `assert`, function `test_…` and `unittest.TestCase` method is a test;
      without any, `check` is called with the function `entry_point`, as in HumanEval. The tests use the names of the
      code, or import them from `solution`.
    - a list of `{"input": …, "output": …}`: the code is a program whose output on `input` must equal `output`, except
      for white space at line ends and at the text's end.

    Everything runs in the sandbox. Tests in Python run in another process than the code, which can neither read them
    nor report a result. Plain values (numbers, texts, lists and so on) are copied between the processes, and other
    objects stay in the process of the code; they never equal a plain value.

    Args:
        test_timeout: seconds for one test.
        timeout: seconds for all tests of an episode; tests that have not run fail. Must be below `task_judge.timeout`.
        memory: bytes for all processes together.
        all_or_nothing: the reward is 0 unless all tests pass.
        tests_field, entry_point_field: the tests and the function in the metadata of the task.
        answer_field: the answer in the metadata of the workflow's output.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        test_timeout: float = 5.0,
        timeout: float = 30.0,
        memory: int = 2**30,
        all_or_nothing: bool = False,
        tests_field: str = "tests",
        entry_point_field: str = "entry_point",
        answer_field: str = "final_answer",
    ) -> None:
        super().__init__(config)
        if not 0 < test_timeout <= timeout < config.timeout:
            raise ValueError(
                f"test_timeout is {test_timeout:g} s, timeout {timeout:g} s, and task_judge.timeout "
                f"{config.timeout:g} s; each must be shorter than the next"
            )
        self.test_timeout, self.timeout, self.all_or_nothing = test_timeout, timeout, all_or_nothing
        self.limits = SandboxLimits(memory=memory, processes=32)
        self.tests_field, self.entry_point_field, self.answer_field = tests_field, entry_point_field, answer_field

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode.

        Raises:
            JudgeError: the answer or the tests are missing, of another type, or invalid.
            UnscoredError: the sandbox cannot run the tests; the cause is `sandbox`.
        """
        name = type(self).__name__
        tests = task_value(workflow_task, self.tests_field, name)
        tests = tests.tolist() if hasattr(tests, "tolist") else tests  # numpy, from a Parquet file
        code = extract_code(answer_text(workflow_output, self.answer_field, name))
        sources: Any = [tests] if isinstance(tests, str) else tests
        owner = f"{self.tests_field!r} in {of_task(workflow_task)}"
        try:
            if _are_all(sources, str):
                entry_point = workflow_task.task.metadata.get(self.entry_point_field)
                results = await self._run_tests(code, sources, entry_point, owner)
            elif _are_all(sources, Mapping) and all({"input", "output"} <= pair.keys() for pair in sources):
                results = await self._run_pairs(code, sources)
            else:
                raise JudgeError(
                    f"{owner} is {short_repr(tests)}; expected Python source, a list of sources, or a list of mappings "
                    "with input and output"
                )
        except SandboxError as error:
            raise UnscoredError(str(error), "sandbox") from error
        # Of each test, its name and why it has failed, "" if it has passed.
        failed = [(name, why) for name, why in results if why]
        fraction = 1 - len(failed) / len(results)
        text = f"{len(results) - len(failed)} of {len(results)} tests passed"
        if failed:
            text += f"; {shorten(failed[0][0], 120)}: {failed[0][1]}"
        reward = 0.0 if failed and self.all_or_nothing else fraction
        return Judgement(reward, not failed, {"tests_passed": fraction}, explanation=text)

    async def _run_tests(
        self, code: str, sources: Sequence[str], entry_point: object, owner: str
    ) -> list[tuple[str, str]]:
        nonce = secrets.token_hex(16)
        job = {"nonce": nonce, "tests": sources, "entry_point": entry_point, "test_timeout": self.test_timeout}
        host = (_FOLDER / "solution_host.py").read_text(encoding="utf-8")
        files = {"solution_host.py": host, "solution.py": code, "job.json": json.dumps(job)}
        tester = (_FOLDER / "tester.py").read_text(encoding="utf-8")
        limits = replace(self.limits, output=_REPORT_BYTES)
        # Isolated, so that modules that the code has written to the folder are not imported.
        result = await run_python_program(tester, self.timeout, limits, files=files, isolated=True)
        reports: list[dict[str, Any]] = []
        for line in result.stdout.splitlines():
            if line.startswith(f"{nonce} "):
                reports.append(json.loads(line.removeprefix(f"{nonce} ")))
        first = reports[0] if reports else {}
        if "invalid" in first:
            raise JudgeError(f"{owner} cannot be run: {first['invalid']}")
        if "started" not in first:
            raise SandboxError(f"the tests did not start: {shorten(result.stderr) or f'exit code {result.returncode}'}")
        second = reports[1] if len(reports) > 1 else {"failed": _end_of(result, "the solution ended the tests")}
        if "failed" in second:
            return [("the solution", second["failed"])]
        if not second["tests"]:
            raise JudgeError(f"{owner} has no tests: it needs asserts, functions test_…, or check and an entry_point")
        outcomes = {report["test"]: "" if report["passed"] else report["why"] or "failed" for report in reports[2:]}
        missing = _end_of(result, "the solution ended the tests")
        return [(name, outcomes.get(number, missing)) for number, name in enumerate(second["tests"])]

    async def _run_pairs(self, code: str, pairs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        results: list[tuple[str, str]] = []
        left = self.timeout
        for number, pair in enumerate(pairs, start=1):
            expected = str(pair["output"])
            limits = replace(self.limits, output=max(self.limits.output, 2 * len(expected.encode()) + 1024))
            seconds = min(self.test_timeout, left)
            why = "timeout: the tests before took too long"
            if seconds > 0:
                started = time.monotonic()
                result = await run_python_program(code, seconds, limits, stdin=str(pair["input"]), isolated=True)
                left -= time.monotonic() - started
                if result.missing is None and result.ended_by is None:
                    raise SandboxError(f"the program did not start: {shorten(result.stderr)}")
                why = _difference(result, expected)
            results.append((f"input {number}", why))
        return results


def extract_code(answer: str) -> str:
    """Return the code of an answer: its last code block that is Python's or has no language, else the whole text."""
    blocks = [code for language, code in _FENCED.findall(answer) if language.strip().lower() in ("", "python", "py")]
    return str(blocks[-1]) if blocks else answer


def _are_all(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(isinstance(value, kind) for value in values)


def _difference(result: SandboxResult, expected: str) -> str:
    """Return the fault of a program; "" if its output is as expected."""
    if result.ended_by or result.returncode != 0:
        return _end_of(result, f"exit code {result.returncode}")
    wrote, wants = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (result.stdout, expected))
    if wrote == wants:
        return ""
    return f"the output is {short_repr(result.stdout[:100])}, not {short_repr(expected[:100])}"


def _end_of(result: SandboxResult, otherwise: str) -> str:
    """Return how a program ended: by a limit, with an exception, or `otherwise`."""
    if result.ended_by == "time":
        return "timeout: the tests took too long"
    if result.ended_by == "memory":
        return "memory: the processes used more than the limit"
    last = result.stderr.strip().rpartition("\n")[2]
    return f"{otherwise}; {last}"[:_MAX_WHY] if last else otherwise
