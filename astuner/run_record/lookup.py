"""Finds a run and an episode by the name that somebody gave."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from astuner.errors import RecordError
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.folder import is_record

_MOST_RUNS_LISTED = 10
_MOST_EPISODES_LISTED = 5
# Comparing with every id of a long run would take seconds.
_MOST_IDS_COMPARED = 2000


def find_run(name: str, exp_dir: Path) -> Path:
    """Return the folder of a run, given as a path or as the experiment's name under `exp_dir`.

    Raises:
        RecordError: there is no such run; lists those that there are.
    """
    for folder in (Path(name), exp_dir / name):
        if is_record(folder):
            return folder
    raise RecordError(
        f"{name!r} is no run: expected the folder of one, or a name under {exp_dir} (--exp-dir); "
        + _what_there_is(name, exp_dir)
    )


def find_episode(name: str, entries: Sequence[EpisodeEntry]) -> EpisodeEntry:
    """Return the episode with the id `name`, or the only one whose id begins so.

    Raises:
        RecordError: there is none, or there are several; lists near ones.
    """
    exact = [entry for entry in entries if entry.episode_id == name]
    if exact:
        return exact[-1]
    found = [entry for entry in entries if entry.episode_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RecordError(
            f"{len(found)} episodes of the run begin with {name!r}; give more of the id: {_listed_ids(found)}"
        )
    raise RecordError(f"the run has no episode {name!r}; {_near_ids(name, entries)}")


def _what_there_is(name: str, exp_dir: Path) -> str:
    runs = [folder for folder in exp_dir.iterdir() if is_record(folder)] if exp_dir.is_dir() else []
    if not runs:
        return "there is none yet"
    # The run of interest is rarely an old one.
    names = [folder.name for folder in sorted(runs, key=lambda folder: -folder.stat().st_mtime)]
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(names) - _MOST_RUNS_LISTED} more" if len(names) > _MOST_RUNS_LISTED else ""
    return f"{hint}there are: {', '.join(names[:_MOST_RUNS_LISTED])}{more}"


def _near_ids(name: str, entries: Sequence[EpisodeEntry]) -> str:
    if not entries:
        return "no episode is recorded yet"
    holding = [entry for entry in entries if name in entry.episode_id]
    if holding:
        return f"these have it in their id: {_listed_ids(holding)}"
    ids = [entry.episode_id for entry in entries[:_MOST_IDS_COMPARED]]
    near = get_close_matches(name, ids, _MOST_EPISODES_LISTED, cutoff=0.5)
    return f"near ones: {', '.join(near)}" if near else f"its ids look so: {_listed_ids(entries)}"


def _listed_ids(entries: Sequence[EpisodeEntry]) -> str:
    more = ", …" if len(entries) > _MOST_EPISODES_LISTED else ""
    return ", ".join(entry.episode_id for entry in entries[:_MOST_EPISODES_LISTED]) + more
