"""The indexes of a folder's runs, of which only those last asked for are kept open."""

from __future__ import annotations

import threading
from pathlib import Path

from astuner.viewer.index import RunIndex
from astuner.viewer.runs import Runs

# Three files each: with every run's index open, a few hundred runs would be all that a process may have.
_MOST_OPEN = 32


class Indexes:
    """The index of each run that was looked at; safe to use from several threads."""

    def __init__(self, runs: Runs, cache: Path | None = None) -> None:
        self.runs = runs
        self._cache = cache
        self._open: dict[Path, RunIndex] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> RunIndex:
        """Return the index of a run.

        Raises:
            RecordError: there is no such run.
        """
        folder = self.runs.folder(name)
        with self._lock:
            # Taken out and put back, so that the one not asked for longest comes first.
            index = self._open.pop(folder, None) or RunIndex(folder, self._cache)
            self._open[folder] = index
            surplus = [self._open.pop(oldest) for oldest in list(self._open)[:-_MOST_OPEN]]
        for other in surplus:
            other.close()
        return index

    def close_all_but(self, folders: set[Path]) -> None:
        """Close those of other folders than these."""
        with self._lock:
            gone = [self._open.pop(folder) for folder in self._open.keys() - folders]
        for index in gone:
            index.close()

    def close(self) -> None:
        """Close them."""
        self.close_all_but(set())
