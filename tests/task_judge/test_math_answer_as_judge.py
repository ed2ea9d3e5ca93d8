"""The judge for mathematical answers, on real and on hostile answers, with the real math-verify."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge import math_verify_server
from astuner.task_judge.math_answer_as_judge import MathAnswerAsJudge, MathVerify, is_same_answer
from astuner.task_judge.scoring import score

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 in all.\n#### 72"


def boxed(answer: str) -> str:
    return rf"We find \boxed{{{answer}}}."


def judge_inputs(answer: Any, final_answer: Any) -> tuple[WorkflowTask, WorkflowOutput]:
    task = Task("t-1", "How many?", metadata={"question": "How many?", "answer": answer})
    return WorkflowTask(task, episode_id="e-1"), WorkflowOutput(metadata={"final_answer": final_answer})


@pytest.fixture
def judge() -> MathAnswerAsJudge:
    return MathAnswerAsJudge(TaskJudgeConfig())


RIGHT = [
    (GSM8K, "72"),
    (GSM8K, boxed("72")),
    (GSM8K, "The answer is 72."),
    (GSM8K, "<think>#### 5</think> so #### 72"),
    (72, "72"),
    (72.0, 72),
    ("1/2", boxed(r"\frac{1}{2}")),
    (r"\frac{1}{2}", boxed("0.5")),
    (r"\boxed{\frac{1}{2}}", "1/2"),
    ("0.5", boxed(r"50\%")),
    ("50", boxed("50%")),
    ("50%", "it is about 50 percent"),
    ("1,234", boxed("1234")),
    ("1234", boxed("1{,}234")),
    ("#### 1,234", "It is 1,234 in all."),
    ("72", boxed(r"\$72.00")),
    ("72", boxed("72 dollars")),
    ("72", boxed(r"72\text{ cm}")),
    ("72", "She makes $72 every day."),
    ("-5", boxed("\u22125")),
    ("4", r"\boxed{3}, or rather \boxed{4}"),
    ("3", r"\boxed{3}, or rather \boxed{\frac{"),
    ("1/3", boxed("0.333333")),
    ("3", "x = 3"),
    ("7", "3 + 4 = 7"),
    (r"2\sqrt{2}", boxed(r"\sqrt{8}")),
    (r"2\sqrt{2}", r"2\sqrt{2}"),
    ("x^2+2x+1", boxed("(x+1)^2")),
    (r"1\frac{1}{2}", boxed("1.5")),
    (r"\{1, 2\}", boxed("2, 1")),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", boxed(r"\begin{pmatrix}1\\2\end{pmatrix}")),
    ("5000", boxed(r"5 \times 10^3")),
    ("B", boxed(r"\text{B}")),
    ("blue", boxed("blue")),
]
WRONG = [
    (GSM8K, "24"),
    (GSM8K, ""),
    (GSM8K, None),
    (GSM8K, "I do not know."),
    (GSM8K, boxed("")),
    ("-5", boxed("5")),
    ("0.5", boxed(r"5\%")),
    ("3", r"\boxed{3}, or rather \boxed{4}"),
    ("2", r"2\sqrt{2}"),
    ("2", boxed("2x")),
    (r"2\sqrt{2}", "2"),
    ("1/3", boxed("0.33")),
    ("5", boxed("5 million")),
    ("5", boxed(r"5 \text{ million}")),
    ("B", boxed("C")),
    ("blue", boxed("red")),
    (r"\pi", boxed("3.14")),
]


@pytest.mark.parametrize(("answer", "final"), RIGHT)
def test_right_answers(judge: MathAnswerAsJudge, answer: Any, final: Any) -> None:
    assert judge.compute_reward(*judge_inputs(answer, final)) == (1.0, True)


@pytest.mark.parametrize(("answer", "final"), WRONG)
def test_wrong_answers(judge: MathAnswerAsJudge, answer: Any, final: Any) -> None:
    assert judge.compute_reward(*judge_inputs(answer, final)) == (0.0, False)


def test_missing_answer_is_an_error(judge: MathAnswerAsJudge) -> None:
    task, output = judge_inputs("72", "72")
    with pytest.raises(JudgeError, match=r"output metadata has no 'final_answer'.* Its keys: answer, log\."):
        judge.compute_reward(task, WorkflowOutput(metadata={"log": 1, "answer": 2}))
    bare = WorkflowTask(Task("t-9", "How many?", metadata={"solution": "72"}), episode_id="e-1")
    with pytest.raises(JudgeError, match=r"metadata of task t-9 has no 'answer'.* Its keys: solution\."):
        judge.compute_reward(bare, output)
    for empty in ("", " \n", None):
        with pytest.raises(JudgeError, match="task t-1 has an empty `answer`"):
            judge.compute_reward(*judge_inputs(empty, "72"))
    with pytest.raises(JudgeError, match=r"'final_answer' .* is of type list; expected a string or a number"):
        judge.compute_reward(*judge_inputs("72", ["72"]))


def test_whole_numbers_are_compared_without_math_verify() -> None:
    code = """
import psutil
from astuner.task_judge.math_answer_as_judge import is_same_answer
from tests.work import calls_of

answers = [(f"#### {n:,}", chr(92) + f"boxed{{{n + n % 2}}}") for n in range(200)]
equal = []
calls = calls_of(lambda: equal.extend(is_same_answer(gold, answer) for gold, answer in answers))
print(sum(equal), len(psutil.Process().children()), calls // 200)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    equal, children, calls_per_answer = map(int, done.stdout.split())
    assert (equal, children) == (100, 0)  # math-verify would run in a child process
    assert calls_per_answer < 300


def test_comparison_of_numbers_agrees_with_math_verify() -> None:
    for gold, answer in [("72", "72"), ("72", "73"), ("-5", "5"), ("007", "7"), ("1,234", "1234"), ("1/2", "0.5")]:
        assert is_same_answer(gold, boxed(answer)) is math_verify_server.is_same([boxed(gold)], [boxed(answer)])


HOSTILE = [
    boxed(r"\frac{1}{" * 20 + "1" + "}" * 20),
    "(" * 5000 + "1" + ")" * 5000,
    "9**9**9**9",
    "a" * 1_000_000,
    "9" * 1_000_000,
    boxed("9" * 1_000_000),
    r"\boxed{" * 150_000,
    r"\boxed{1}" + "{" * 1_000_000,
    "$" * 1_000_000,
    "answer " * 100_000,
    "answer is $x" * 50_000,
    "\x00\ud83d",
]


async def test_hostile_answers_are_wrong_and_do_not_block(judge: MathAnswerAsJudge) -> None:
    """Each comparison has its own limits; the event loop is not blocked, and later answers are judged correctly."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    scores = await asyncio.gather(*[score(judge, *judge_inputs("72", answer), timeout=60) for answer in HOSTILE])
    ticking.cancel()
    assert scores == [Judgement(0.0, False)] * len(HOSTILE)
    assert ticks >= 20
    assert await score(judge, *judge_inputs("1/2", boxed(r"\frac{x}{2x}")), timeout=60) == Judgement(1.0, True)


def test_concurrent_comparisons_from_many_threads() -> None:
    pairs = [(f"{n}/7", boxed(rf"\frac{{{2 * n + n % 2}}}{{14}} + 0")) for n in range(1, 41)]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda pair: is_same_answer(*pair), pairs))
    assert verdicts == [n % 2 == 0 for n in range(1, 41)]


def servers() -> list[psutil.Process]:
    def command(process: psutil.Process) -> list[str]:
        return process.as_dict(["cmdline"], ad_value=[])["cmdline"]  # another test's ended child has none

    children = psutil.Process().children()
    return [process for process in children if any("math_verify_server" in part for part in command(process))]


def test_killed_server_is_restarted() -> None:
    process = MathVerify()
    before = set(servers())
    assert process.is_same(["x + 1"], ["$1 + x$"]) is False  # a bare expression is no mathematics to math-verify
    assert process.is_same(["$x + 1$"], ["$1 + x$"])
    (server,) = set(servers()) - before
    assert os.getpgid(server.pid) != os.getpgrp()  # so that Ctrl-C does not reach it
    assert server.rlimit(psutil.RLIMIT_AS)[0] == math_verify_server.MEMORY_BYTES
    for number in range(8):
        for child in server.children():  # the one that compares, while it is idle
            child.send_signal(signal.SIGKILL)
        assert process.is_same(["$x + 1$"], [f"$1 + x + {number % 2}$"]) is (number % 2 == 0)
    server.kill()
    assert process.is_same(["$x + 1$"], ["$1 + x$"])
    process.close()
    psutil.wait_procs(set(servers()) - before, timeout=10)  # the killed server's child ends when its input does
    assert set(servers()) == before


def test_a_comparison_whose_server_ends_is_made_again() -> None:
    """As where the worker that had started the shared server ends."""
    process = MathVerify()
    before = set(servers())
    assert process.is_same(["$x + 1$"], ["$1 + x$"])
    (server,) = set(servers()) - before
    (child,) = server.children()
    child.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(process.is_same, ["$x + 2$"], ["$2 + x$"])
        time.sleep(0.2)
        for each in (server, child):
            each.terminate()
        child.send_signal(signal.SIGCONT)
        assert verdict.result(30) is True
    process.close()


def test_the_processes_of_a_run_share_a_server_and_replace_it(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 120)  # longer than the path of a socket may be
    folder.mkdir()
    code = """
import sys
from pathlib import Path
from astuner.helper_llm.usage import share_limits
from astuner.task_judge.math_answer_as_judge import is_same_answer
share_limits(Path(sys.argv[1]))
for line in sys.stdin:
    print(is_same_answer("x + 1", "1 + x") and not is_same_answer("x + 1", "2 + x"), flush=True)
"""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]

    def compare(some: list[subprocess.Popen[str]]) -> list[str]:
        for worker in some:
            print(file=worker.stdin, flush=True)
        return [worker.stdout.readline().strip() for worker in some]  # type: ignore[union-attr]

    assert compare(workers) == ["True"] * 3
    owners = [worker for worker in workers if psutil.Process(worker.pid).children()]
    assert len(owners) == 1
    owners[0].kill()
    owners[0].communicate()
    others = [worker for worker in workers if worker is not owners[0]]
    assert compare(others) == ["True"] * 2
    for worker in others:
        worker.communicate()


def test_missing_math_verify_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JudgeError, match=r"math-verify cannot be started: ImportError: no antlr.* Install it with"):
        MathVerify().is_same(["$1$"], ["$x$"])


def test_neither_the_import_nor_whole_numbers_load_math_verify() -> None:
    code = (
        "import sys\nfrom astuner.task_judge.math_answer_as_judge import is_same_answer\n"
        "assert is_same_answer('#### 72', '\\\\boxed{72}') and not is_same_answer('72', '73')\n"
        "print([name for name in ('math_verify', 'sympy', 'torch') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_after_a_fork_each_process_has_its_own_server_and_none_outlives_it() -> None:
    code = """
import os, sys
from astuner.task_judge.math_answer_as_judge import is_same_answer
def right(): return is_same_answer("x + 1", "1 + x") and not is_same_answer("x + 1", "2 + x")
assert right()
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
assert os.waitpid(child, 0)[1] == 0
assert right()
import psutil
print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2  # the server, and its child that compares
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "the server outlived a process that was killed"
        time.sleep(0.05)


@pytest.mark.parametrize("metadata", [{"answer": ""}, {}, {"answer": ["3"]}, {"x" * 100_000: "3"}])
async def test_long_ids_and_fields_are_shortened_in_messages(judge: MathAnswerAsJudge, metadata: dict[str, Any]):
    task = WorkflowTask(Task("t" * 100_000, "How many?", metadata=metadata), episode_id="e-1")
    with pytest.raises(JudgeError) as caught:
        await score(judge, task, WorkflowOutput(metadata={"final_answer": "3"}), timeout=None)
    assert len(str(caught.value)) < 2_000
