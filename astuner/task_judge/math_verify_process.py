"""Keeps the math-verify server running and asks it (see `math_verify_server` for why it is a process)."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from loguru import logger

from astuner.errors import JudgeError

_SERVER = Path(__file__).with_name("math_verify_server.py")


class MathVerifyProcess:
    """One server for all threads of a process; starts with the first question, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0  # of the latest question
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by own process id: a fork starts a server of its own
        os.register_at_fork(after_in_child=self._renew_lock)
        atexit.register(self.close)

    def is_same(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        """Ask whether two answers are equal; one that takes the server too long or too much memory is not.

        Args:
            gold: readings of the reference answer, best first.
            answer: readings of the answer to judge.

        Raises:
            JudgeError: the server cannot be started, or is killed again and again.
        """
        with self._lock:
            self._number += 1
            question = json.dumps({"number": self._number, "gold": gold, "answer": answer}).encode() + b"\n"
            for _ in range(2):
                verdict = self._ask(question)
                if verdict is not None:
                    break
                self.close()
        if verdict is None:
            raise JudgeError("the math-verify process ended twice while it compared one answer; is memory short?")
        if verdict == "died":
            logger.warning(
                "Counted as wrong: an answer that math-verify cannot compare within its limits: {!r} (reference {!r}).",
                answer[0][:80],
                gold[0][:80],
            )
        return verdict == "same"

    def close(self) -> None:
        """End the server; the next question starts another."""
        process = self._running.pop(os.getpid(), None)
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # a question that was never read
                assert pipe is not None
                pipe.close()

    def _ask(self, question: bytes) -> str | None:
        """`same`, `different`, or `died` where the comparison went over its limits; None if the server is gone."""
        process = self._running.get(os.getpid()) or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        begun = None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            for line in process.stdout:
                word, number = line.decode().split()
                if word == "begin":
                    begun = int(number)
                elif word == "died" and begun != self._number:
                    # A child that was killed while idle may have taken the question along; a second copy of it
                    # that is answered later is known by its number.
                    process.stdin.write(question)
                    process.stdin.flush()
                elif word == "died" or int(number) == self._number:
                    return word
        except BrokenPipeError:
            return None
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the run, which then ends the server
            )
            self._running[os.getpid()] = process
            assert process.stdout is not None
            if process.stdout.readline() == b"ready\n":
                return process
            self.close()
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        raise JudgeError(
            f"math-verify cannot be started: {''.join(reason) or 'it ended at once'}."
            ' Install it with `pip install "math-verify[antlr4_9_3]"`.'
        )

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()
