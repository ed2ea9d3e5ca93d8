"""The judge for mathematical answers."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from loguru import logger
from pydantic import BaseModel

from astuner.errors import JudgeError, shorten
from astuner.helper_llm.client import NoAnswer
from astuner.helper_llm.usage import shared_folder
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.system.process_tree import kept_pids
from astuner.task_judge.judge_base import BaseJudge, answer_text, as_text, of_task, task_value
from astuner.task_judge.llm.llm_judge import LlmJudge, question_of, undecided, unscored
from astuner.task_judge.llm.prompts import fenced_prompt
from astuner.task_judge.math_text import PlainNumber, final_answer, is_bare_expression, plain_number

_MAX_CHARACTERS = 1000
"""The maximum length of an answer that is marked in the text; longer ones are wrong."""
_MAX_TAIL = 2000
"""The length of a text's end that is searched for an answer, if no answer is marked."""

_SERVER = Path(__file__).with_name("math_verify_server.py")
_SOCKET = "math-verify"


class MathVerify:
    """This process's connection to a math-verify server (see `math_verify_server` for why it is a separate process).

    The processes of a run share a server, because each takes a second of processor time and 70 MB. The first one that
    needs it starts it. If it ends, the next one that needs it starts another.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._own_folder: Path | None = None

    def is_same(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        """Return whether two answers are equal; False if the comparison takes too much time or memory.

        Args:
            gold: forms of the reference answer to try to parse, best first.
            answer: forms of the answer to judge.

        Raises:
            JudgeError: the server cannot be started, or was killed twice.
        """
        with self._lock:
            request = json.dumps({"gold": gold, "answer": answer}).encode() + b"\n"
            for _ in range(3):  # the connection may have ended before, and then the server
                if (verdict := self._request(request)) is not None:
                    break
        if verdict is None:
            raise JudgeError(
                "the math-verify process was killed twice while it compared an answer; check the available memory"
            )
        if verdict == "died":
            logger.warning(
                "an answer counts as wrong because math-verify exceeded its limits: {!r} (reference {!r})",
                answer[0][:80],
                gold[0][:80],
            )
        return verdict == "same"

    def close(self) -> None:
        """Close the connection, and end the server if this process has started it."""
        self._disconnect()
        self._end_server()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            self._own_folder = None

    def _request(self, request: bytes) -> str | None:
        """Return `same`, `different`, or `died` if the comparison exceeded its limits; None if the server has ended."""
        if self._connection is None:
            self._connection = self._connect()
        has_begun = False
        with suppress(ConnectionError):
            self._connection.sendall(request)
            for line in self._connection.makefile("rb"):
                word = line.decode().strip()
                if word == "died":
                    self._disconnect()
                    return "died" if has_begun else None
                if word != "begin":
                    return word
                has_begun = True
        self._disconnect()
        return None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket:
        folder = shared_folder()
        if folder is None:
            if self._own_folder is None:
                self._own_folder = Path(tempfile.mkdtemp(prefix="astuner-math-verify-"))
            folder = self._own_folder
        if (connection := _connection(folder)) is None:
            with (folder / "math-verify.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process starts the server
                if (connection := _connection(folder)) is None:
                    self._start(folder)
                    connection = _connection(folder)
        if connection is None:
            raise JudgeError("the math-verify process ended at once; check the available memory")
        return connection

    def _end_server(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.kill()
            self._server.wait()
            kept_pids.discard(self._server.pid)
            self._server = None

    def _start(self, folder: Path) -> None:
        self._end_server()
        with tempfile.TemporaryFile() as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-P", str(_SERVER), str(folder / _SOCKET)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends the server
            )
            kept_pids.add(self._server.pid)
            assert self._server.stdout is not None
            with self._server.stdout as stdout:
                if stdout.readline() == b"ready\n":
                    return
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        raise JudgeError(
            f"math-verify cannot be started: {''.join(reason) or 'the process exited without a message'}."
            ' Install it with `pip install "math-verify>=0.9"`.'
        )


def _connection(folder: Path) -> socket.socket | None:
    """Return a connection to the server whose socket is in the folder; None if no server listens."""
    connection = socket.socket(socket.AF_UNIX)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The path of a socket has at most 107 bytes, so Linux gets a short name for the folder.
        near = f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(folder)
        connection.connect(f"{near}/{_SOCKET}")
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    finally:
        os.close(descriptor)
    return connection


_math_verify = MathVerify()


class MathAnswerAsJudge(BaseJudge):
    r"""Compares `final_answer` in the workflow's metadata with `answer` in the task's; the reward is 1.0 or 0.0.

    The answer is the last complete `\boxed{…}`, else the text after `####`, else the expression that math-verify finds
    in the text. Numbers are compared exactly, after removing thousands separators, currencies and units, and reading
    percent signs; math-verify compares everything else (Kydlíček, https://github.com/huggingface/Math-Verify). An
    answer that is empty, is not mathematical, or takes too long to compare is wrong.
    """

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        """Score one episode.

        Raises:
            JudgeError: an answer is missing or is neither a text nor a number, the reference is empty, or math-verify
                cannot be started.
        """
        solved = is_same_answer(*_answers(self, workflow_task, workflow_output))
        return float(solved), solved


class SameAnswer(BaseModel):
    """The LLM's answer: whether two answers are the same; null if it cannot tell."""

    reason: str = ""
    same: bool | None


class MathAnswerAndLlmAsJudge(LlmJudge):
    """Compares answers like `MathAnswerAsJudge`, and asks an LLM where the rule cannot tell.

    The rule decides if the answers are equal, if one is empty, and if both are plain numbers. The LLM decides about all
    others, such as an answer in words or in a notation that the rule cannot read.
    """

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode.

        Raises:
            JudgeError: as for `MathAnswerAsJudge`.
            JudgeUnavailableError: the LLM cannot be asked any more.
        """
        gold, answer = _answers(self, workflow_task, workflow_output)
        # math-verify runs in another process, for which the event loop must not wait.
        if await asyncio.to_thread(is_same_answer, gold, answer):
            return Judgement(1.0, True, explanation="the rule: the answers are the same")
        gold_part, part = final_answer(gold)[0], final_answer(answer)[0]
        if not part.strip() or (_number(gold_part) and _number(part)):
            return Judgement(0.0, False, explanation="the rule: the answers differ")
        form = 'Answer with one JSON object: {"reason": "one sentence", "same": true}. "same" is true, false or null.'
        task = "You decide whether the final answer of a solution is the same as the correct answer to a question."
        texts = {
            "question": question_of(workflow_task, "main_query"),
            "correct answer": gold,
            "solution": answer[-_MAX_TAIL:],
        }
        try:
            result = await self.ask(fenced_prompt(task, texts, form), SameAnswer)
        except NoAnswer as error:
            return unscored(error)
        if result.value.same is None:
            return undecided(result.value.reason, result.usage)
        explanation = f"the LLM: {result.value.reason}"
        same = result.value.same
        return Judgement(float(same), same, explanation=explanation, metrics=result.usage.metrics())


def _answers(judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[str, str]:
    """Return the reference and the agent's answer."""
    name = type(judge).__name__
    gold = as_text(task_value(workflow_task, "answer", name), "answer", of_task(workflow_task))
    if not gold.strip():
        raise JudgeError(f"task {shorten(workflow_task.task_id)} has an empty `answer`, so no answer can be correct.")
    return gold, answer_text(workflow_output, "final_answer", name)


def is_same_answer(gold: str, answer: str) -> bool:
    """Return whether `answer` equals the reference `gold`.

    Args:
        gold: the reference answer, or a text in which it is marked.

    Raises:
        JudgeError: math-verify cannot be started.
    """
    gold_part, gold_is_marked = final_answer(gold)
    part, is_marked = final_answer(answer)
    if not part or (is_marked and len(part) > _MAX_CHARACTERS):
        return False
    if part.split() == gold_part.split():
        return True
    gold_number, number = _number(gold_part), _number(part)
    if gold_number and number:
        if number.equals(gold_number):
            return True
        if number.is_whole and gold_number.is_whole:
            return False
    return _math_verify.is_same(
        [gold_number.text] if gold_number else _readings(gold_part, gold_is_marked),
        [number.text] if number else _readings(part, is_marked),
    )


def _number(part: str) -> PlainNumber | None:
    return plain_number(part) if len(part) <= _MAX_CHARACTERS else None


def _readings(part: str, is_marked: bool) -> list[str]:
    """Return the candidate texts of an answer that math-verify parses, the best one first."""
    boxed = rf"\boxed{{{part}}}"
    if is_marked:
        return [boxed]
    tail = part[-_MAX_TAIL:]
    return [boxed, tail] if len(part) <= _MAX_CHARACTERS and is_bare_expression(part) else [tail]
