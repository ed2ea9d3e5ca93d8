"""Programs in the sandbox under the event loop of uvloop, whose policy Ray sets in its actors."""

from __future__ import annotations

import asyncio

import pytest

from astuner.sandbox import run_python_program

pytestmark = pytest.mark.trinity


@pytest.mark.parametrize(
    ("code", "timeout", "result"),
    [("print(6 * 7)", 60.0, (0, "42\n", None)), ("import time; time.sleep(600)", 1.0, (-1, "", "time"))],
)
def test_a_program_runs_to_its_end_or_its_limit(code: str, timeout: float, result: tuple[int, str, str | None]):
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ended = runner.run(run_python_program(code, timeout))
    assert (ended.returncode, ended.stdout, ended.ended_by) == result
