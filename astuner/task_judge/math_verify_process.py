"""Client of the math-verify server (see `math_verify_server` for why it is a separate process)."""

from __future__ import annotations

import atexit
import contextvars
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
    """The server for all threads in a process. It starts with the first comparison, and restarts if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0  # of the latest request
        # By the id of this process, so that a forked process starts its own server.
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        os.register_at_fork(after_in_child=self._renew_lock)
        atexit.register(self.close)

    def is_same(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        """Return whether two answers are equal; False if the comparison takes too much time or memory.

        Args:
            gold: forms of the reference answer to try to parse, best first.
            answer: forms of the answer to judge.

        Raises:
            JudgeError: the server cannot be started, or was killed twice.
        """
        with self._lock:
            self._number += 1
            request = json.dumps({"number": self._number, "gold": gold, "answer": answer}).encode() + b"\n"
            for _ in range(2):
                verdict = self._request(request)
                if verdict is not None:
                    break
                self.close()
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
        """End the server; the next comparison starts another."""
        process = self._servers.pop(os.getpid(), None)
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # a request that was never read
                assert pipe is not None
                pipe.close()

    def _request(self, request: bytes) -> str | None:
        """Return `same`, `different`, or `died` if the comparison exceeded its limits; None if the server exited."""
        # Started outside of the episode that needs it first, because the processes of an episode end with the episode.
        process = self._servers.get(os.getpid()) or contextvars.Context().run(self._start)
        assert process.stdin is not None
        assert process.stdout is not None
        current = None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            for line in process.stdout:
                word, number = line.decode().split()
                if word == "begin":
                    current = int(number)
                elif word == "died" and current != self._number:
                    # A child that was killed while idle may have read the request already, so it is sent again. If
                    # both copies are answered, the number identifies the second answer.
                    process.stdin.write(request)
                    process.stdin.flush()
                elif word == "died" or int(number) == self._number:
                    return word
        except BrokenPipeError:
            return None
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends the server
            )
            self._servers[os.getpid()] = process
            assert process.stdout is not None
            if process.stdout.readline() == b"ready\n":
                return process
            self.close()
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        raise JudgeError(
            f"math-verify cannot be started: {''.join(reason) or 'the process exited without a message'}."
            ' Install it with `pip install "math-verify>=0.9"`.'
        )

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()
