"""Full-text search over the messages, answers and errors of a run's episodes.

The texts are in the files of the episodes. A thread reads them, the latest episode first, into an SQLite database with
an FTS5 index in the user's cache. A search sees the episodes that were read by then.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from astuner.errors import RecordError, counted
from astuner.viewer.database import database_file, remove_database, remove_least_recent, transaction
from astuner.viewer.text_query import (
    KINDS,
    EpisodeTexts,
    TextQuery,
    excerpt,
    pack,
    read_episode_texts,
    split_characters,
    unpack,
)

# Largest size of one run's database. Episodes that do not fit are not searched, and the page says so.
MAX_BYTES = 2**30
_BATCH = 100
# Seconds that a request waits for the first results of a search that has to read all texts.
_FIRST_RESULTS = 0.15
_MAX_SCANS = 4
# Seconds for the excerpts of one page: texts may be long.
_MAX_EXCERPTS = 0.15
_SCHEMA = """
create table if not exists texts (id integer primary key, answer text, is_cut integer, content blob);
create index if not exists texts_cut on texts (is_cut);
create table if not exists facts (name text primary key, value);
create virtual table if not exists words using fts5
    (prompts, answers, errors, content = '', tokenize = 'unicode61 remove_diacritics 2');
"""

_VERSION = "text2"
# Largest size of all the viewer's databases.
_MAX_CACHE_BYTES = 4 * 2**30

Mode = Literal["words", "parts"]


def text_database(folder: Path, cache: Path | None) -> Path:
    """Return the text search database for the run in `folder`; see `database_file`."""
    return database_file(folder, cache, _VERSION)


@dataclass(frozen=True, slots=True)
class EpisodeList:
    """A run's searchable episodes: the files' `paths` by id, and a `generation` that changes when the ids change."""

    generation: str
    paths: dict[int, str]


@dataclass(slots=True)
class _Scan:
    """A search for a part of a text, which reads all texts."""

    ids: list[int] = field(default_factory=list)
    looked: int = 0
    is_done: bool = False
    is_cancelled: bool = False
    thread: threading.Thread | None = None


@dataclass(frozen=True, slots=True)
class TextHits:
    """The result of a search so far.

    Attributes:
        ids: Ids of the matching episodes.
        mode: `words` if whole words matched, `parts` if the query occurs as a substring, for example within words.
        facts: For the page: how many `episodes` there are, are searched (`indexed`), are searched in part (`cut`), and
            were read by a search for parts (`looked`); whether the search is `done`, and the `error` that prevents it.
    """

    ids: tuple[int, ...]
    mode: Mode
    facts: dict[str, Any]


class TextIndex:
    """The text search of one run. Thread-safe."""

    def __init__(self, file: Path, resolve: Callable[[str], Path], episodes: Callable[[], EpisodeList]) -> None:
        """Create the search in the database `file`. `refresh` starts to read the texts.

        `resolve` returns an episode's file by its path in the record's index, and `episodes` the present episodes.
        """
        self._file = file
        self._resolve = resolve
        self._episodes = episodes
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # The versions of the run that the thread reads or has read, and that it has read completely.
        self._seen: object = None
        self._completed: object = None
        self._error: str | None = None
        self._unreadable = 0
        self._scans: dict[tuple[str, str | None], _Scan] = {}

    def refresh(self, version: object) -> None:
        """Start to read new episodes' texts in the background. Other episodes have another `version`."""
        with self._lock:
            is_idle = self._thread is None or not self._thread.is_alive()
            # The user may delete the file at any time.
            is_outdated = version != self._seen or not self._file.exists()
            if is_idle and is_outdated and not self._stopped.is_set():
                self._seen, self._completed, self._error = version, None, None
                for scan in self._scans.values():
                    scan.is_cancelled = True
                self._scans.clear()
                self._thread = threading.Thread(target=self._read_all, name="text index", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop all threads and wait for them."""
        self._stopped.set()
        with self._lock:
            scans = list(self._scans.values())
        for thread in (self._thread, *(scan.thread for scan in scans)):
            if thread is not None:
                thread.join()

    def search(self, query: TextQuery, kind: str | None, generation: str, episodes: int, version: object) -> TextHits:
        """Return the episodes whose texts match a query.

        If no text has the words, the texts are searched for the query as a substring. This takes longer, so a
        response has the results so far.

        `kind` is one of `KINDS`, or None for all. `generation`, `version` (see `EpisodeList` and `refresh`) and the
        number `episodes` are the present ones.
        """
        facts: dict[str, Any] = {"episodes": episodes, "indexed": 0, "cut": 0, "looked": 0, "done": False}
        facts["error"] = self._error
        try:
            return self._search(query, kind, generation, version, facts)
        except sqlite3.OperationalError as error:  # another process has locked the file
            logger.debug("the text search of {} waits: {}", self._file.name, error)
        except sqlite3.DatabaseError as error:
            logger.warning("the text index {} is damaged ({}) and is created again", self._file.name, error)
            remove_database(self._file)
        return TextHits((), "words", facts)

    def _search(
        self, query: TextQuery, kind: str | None, generation: str, version: object, facts: dict[str, Any]
    ) -> TextHits:
        is_complete = self._completed == version or self._error is not None
        with self._reading(generation) as db:
            if db is None:
                return TextHits((), "words", facts | {"done": self._error is not None})
            indexed, cut = db.execute("select count(*), sum(is_cut) from texts").fetchone()
            facts["indexed"], facts["cut"] = min(indexed, facts["episodes"]), cut or 0
            if query.terms:
                sql = "select rowid from words where words match ?"
                ids = tuple(row[0] for row in db.execute(sql, (query.match_expression(kind),)))
                if ids or not is_complete:
                    return TextHits(ids, "words", facts | {"looked": facts["indexed"], "done": is_complete})
        scan = self._scan(query, kind, generation)
        return TextHits(tuple(scan.ids), "parts", facts | {"looked": scan.looked, "done": scan.is_done and is_complete})

    def excerpts(
        self, query: TextQuery, kind: str | None, mode: Mode, ids: Sequence[int], generation: str
    ) -> dict[int, dict[str, Any]]:
        """Return the matching parts of the texts, by episode id, in bounded time."""
        found = {}
        end = time.monotonic() + _MAX_EXCERPTS
        for number, content in self._rows("content", ids, generation):
            if time.monotonic() > end:
                break
            shown = excerpt(query, unpack(_decompress(content)), kind, by_words=mode == "words")
            if shown is not None:
                found[number] = {"role": shown.role, "parts": shown.parts}
        return found

    def answers(self, ids: Sequence[int], generation: str) -> dict[int, str]:
        """Return the answers of episodes that were read, for records whose index has none."""
        return dict(self._rows("answer", ids, generation))

    def _rows(self, column: str, ids: Sequence[int], generation: str) -> list[tuple[int, Any]]:
        with self._reading(generation) as db:
            if db is None or not ids:
                return []
            marks = ", ".join("?" * len(ids))
            try:
                return [tuple(row) for row in db.execute(f"select id, {column} from texts where id in ({marks})", ids)]
            except sqlite3.DatabaseError:  # the file is damaged; the next search creates it again
                return []

    @contextmanager
    def _reading(self, generation: str) -> Iterator[sqlite3.Connection | None]:
        """Yield the database; None if it does not exist yet or holds other episodes."""
        try:
            connection = sqlite3.connect(f"{self._file.as_uri()}?mode=ro", uri=True, timeout=10)
        except sqlite3.OperationalError:
            yield None
            return
        with closing(connection):
            try:
                row = connection.execute("select value from facts where name = 'generation'").fetchone()
            except sqlite3.DatabaseError:  # The thread creates the tables, or recreates a damaged file.
                row = None
            yield connection if row is not None and row[0] == generation else None

    def _scan(self, query: TextQuery, kind: str | None, generation: str) -> _Scan:
        key = (query.text.lower(), kind)
        with self._lock:
            scan = self._scans.get(key)
            if scan is None:
                scan = self._scans[key] = _Scan()
                for oldest in list(self._scans)[:-_MAX_SCANS]:
                    self._scans.pop(oldest).is_cancelled = True
                arguments = (scan, query, kind, generation)
                scan.thread = threading.Thread(target=self._look_into_all, args=arguments, name="scan", daemon=True)
                scan.thread.start()
        if scan.thread is not None:
            scan.thread.join(_FIRST_RESULTS)
        return scan

    def _look_into_all(self, scan: _Scan, query: TextQuery, kind: str | None, generation: str) -> None:
        needle = query.text.lower()
        try:
            with self._reading(generation) as db:
                rows = db.execute("select id, content from texts order by id desc") if db and needle else ()
                for number, content in rows:
                    if self._stopped.is_set() or scan.is_cancelled:
                        return
                    texts = _decompress(content).lower()
                    if needle in texts and any(needle in text for k, _, text in unpack(texts) if kind in (None, k)):
                        scan.ids.append(number)
                    scan.looked += 1
        except (sqlite3.Error, zlib.error) as error:
            logger.warning("the text search of {} stopped: {}", self._file.name, error)
        finally:
            scan.is_done = True

    def _read_all(self) -> None:
        version = self._seen
        try:
            with closing(self._open_for_writing()) as db:
                while not self._stopped.is_set() and self._synchronise(db, self._episodes()):
                    pass
            with self._lock:
                # Searches that read all texts have not seen the latest.
                for scan in self._scans.values():
                    scan.is_cancelled = True
                self._scans.clear()
            if self._unreadable:
                episodes = counted(self._unreadable, "episode")
                self._error = f"The texts of {episodes} are not searched, because their files cannot be read."
            self._completed = version
        except Exception as error:  # the page shows it; otherwise it would wait for ever
            if "no such module" in str(error):
                self._error = "Messages are not searched: the SQLite of this Python has no FTS5."
            elif isinstance(error, _FullError):
                self._error = str(error)
            elif isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                logger.warning("the text index {} is damaged ({}) and is created again", self._file.name, error)
                remove_database(self._file)
                self._seen = None
            else:
                self._error = f"Messages are not searched: {error}"
                self._seen = None  # a request tries again
                logger.warning("cannot index the texts of {}: {}", self._file.name, error)

    def _open_for_writing(self) -> sqlite3.Connection:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        remove_least_recent(self._file.parent, _MAX_CACHE_BYTES, keep=self._file)
        connection = sqlite3.connect(self._file, timeout=30, isolation_level=None)
        try:
            connection.executescript(f"pragma journal_mode = wal; pragma synchronous = off; {_SCHEMA}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _synchronise(self, db: sqlite3.Connection, episodes: EpisodeList) -> bool:
        """Read new episodes' texts and remove those of removed episodes. Return whether there were new ones."""
        with transaction(db):
            row = db.execute("select value from facts where name = 'generation'").fetchone()
            if row is None or row[0] != episodes.generation:
                db.execute("delete from texts")
                db.execute("insert into words (words) values ('delete-all')")
                db.execute("insert or replace into facts values ('generation', ?)", (episodes.generation,))
        known = {row[0] for row in db.execute("select id from texts")}
        self._remove(db, sorted(known - episodes.paths.keys()))
        missing = sorted(episodes.paths.keys() - known)
        self._unreadable, has_new = 0, False
        for end in range(len(missing), 0, -_BATCH):
            # Ascending within a batch, because FTS5 writes a segment whenever ids descend.
            batch = missing[max(0, end - _BATCH) : end]
            texts = [(number, self._read(episodes.paths[number])) for number in batch if not self._stopped.is_set()]
            if self._stopped.is_set():
                return False
            size = db.execute("pragma page_count").fetchone()[0] * db.execute("pragma page_size").fetchone()[0]
            if size > MAX_BYTES:
                raise _FullError(
                    f"Messages of the {end:,} oldest episodes are not searched: the search index has its largest "
                    f"size, {MAX_BYTES / 2**30:.3g} GiB."
                )
            readable = [(number, found) for number, found in texts if found is not None]
            self._unreadable += len(texts) - len(readable)
            self._write(db, readable, episodes.generation)
            has_new = has_new or bool(readable)
            # Requests have precedence for the interpreter's lock.
            time.sleep(0.002)
        return has_new

    def _read(self, path: str) -> EpisodeTexts | None:
        """Return the texts of an episode; None if its file cannot be read at present."""
        try:
            return read_episode_texts(self._resolve(path))
        except RecordError as error:
            # The page of an episode shows that its file is damaged.
            return None if isinstance(error.__cause__, OSError) else EpisodeTexts((), "")

    def _write(self, db: sqlite3.Connection, texts: Sequence[tuple[int, EpisodeTexts]], generation: str) -> None:
        with transaction(db):
            # Another viewer may have written them, or the run may have been restarted.
            present = db.execute("select value from facts where name = 'generation'").fetchone()[0]
            for number, found in texts if present == generation else ():
                if db.execute("select 1 from texts where id = ?", (number,)).fetchone():
                    continue
                packed = zlib.compress(pack(found).encode(), 1)
                db.execute("insert into texts values (?, ?, ?, ?)", (number, found.answer, found.is_cut, packed))
                words = [split_characters(found.of_kind(kind)) for kind in KINDS]
                db.execute(f"insert into words (rowid, {', '.join(KINDS)}) values (?, ?, ?, ?)", (number, *words))

    def _remove(self, db: sqlite3.Connection, ids: Sequence[int]) -> None:
        for number in ids:
            with transaction(db):
                row = db.execute("select content from texts where id = ?", (number,)).fetchone()
                if row is not None:
                    texts = EpisodeTexts(tuple(unpack(_decompress(row[0]))), "")
                    # An index without its content needs the texts to delete them.
                    words = [split_characters(texts.of_kind(kind)) for kind in KINDS]
                    sql = f"insert into words (words, rowid, {', '.join(KINDS)}) values ('delete', ?, ?, ?, ?)"
                    db.execute(sql, (number, *words))
                    db.execute("delete from texts where id = ?", (number,))


class _FullError(RecordError):
    """The database has its largest size."""


def _decompress(content: bytes) -> str:
    return zlib.decompress(content).decode()
