"""A cache on disk for an LLM's answers, by the question's content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path

from astuner.errors import ServiceError

_BUSY_SECONDS = 30.0


class AnswerCache:
    """Answers by the SHA-256 hash of their questions, in one SQLite file. Safe for concurrent processes and threads.

    The questions themselves are not stored.

    Raises:
        ServiceError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "answers.sqlite"
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            with contextlib.suppress(sqlite3.OperationalError):  # some network file systems have no shared memory
                self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT)")
        except (OSError, sqlite3.Error) as error:
            raise ServiceError(
                f"the cache of the judge's LLM in {folder} cannot be used ({error}); set task_judge.llm.cache_dir to a "
                "folder that can be written, or task_judge.llm.cache to False"
            ) from error

    def get(self, question: str) -> str | None:
        """Return the answer to a question (see `question_hash`), or None."""
        with self._lock:
            row = self._connection.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, question: str, answer: str) -> None:
        """Store an answer; the first of several answers to a question is kept."""
        with self._lock:
            self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (question, answer))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def question_hash(content: Mapping[str, object]) -> str:
    """Return the hash of everything that determines the answer to a question."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def default_cache_folder() -> Path:
    """Return the folder of the cache in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "astuner" / "judge"
