"""Lookup of a run and an episode by name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from astuner.errors import RecordError, did_you_mean, short_repr, shorten
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.folder import is_record

_MAX_RUNS_LISTED = 10
_MAX_EPISODES_LISTED = 5
# A comparison with every id of a long run would take seconds.
_MAX_IDS_COMPARED = 2000


def find_run(name: str, exp_dir: Path) -> Path:
    """Return the folder of a run.

    Args:
        name: The run's folder, or the name of the experiment.
        exp_dir: Folder of the experiments.

    Raises:
        RecordError: If there is no such run. The message lists the existing runs.
    """
    for folder in (Path(name), exp_dir / name):
        if is_record(folder):
            return folder
    runs = [folder for folder in exp_dir.iterdir() if is_record(folder)] if exp_dir.is_dir() else []
    hint = "there are no runs yet"
    if runs:
        # The latest runs first: users rarely look for old ones.
        names = [folder.name for folder in sorted(runs, key=lambda folder: -folder.stat().st_mtime)]
        more = f" and {len(names) - _MAX_RUNS_LISTED} more" if len(names) > _MAX_RUNS_LISTED else ""
        hint = did_you_mean(name, names, "did you mean {}? ")
        hint += f"existing runs: {', '.join(names[:_MAX_RUNS_LISTED])}{more}"
    raise RecordError(
        f"{short_repr(name)} is not a run; give a run's folder, or its name under {exp_dir} (--exp-dir); {hint}"
    )


def find_episode(name: str, entries: Sequence[EpisodeEntry]) -> EpisodeEntry:
    """Return the episode with the id `name`, or the only episode whose id starts with `name`.

    Raises:
        RecordError: If there is no such episode, or there are several. The message lists similar ids.
    """
    exact = [entry for entry in entries if entry.episode_id == name]
    if exact:
        return exact[-1]
    matches = [entry for entry in entries if entry.episode_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RecordError(
            f"{len(matches)} episodes of the run start with {short_repr(name)}; give more of the id: "
            f"{_list_ids(matches)}"
        )
    containing = [entry for entry in entries if name in entry.episode_id]
    ids = [entry.episode_id for entry in entries[:_MAX_IDS_COMPARED]]
    if not entries:
        hint = "no episode is recorded yet"
    elif containing:
        hint = f"ids that contain it: {_list_ids(containing)}"
    elif near := get_close_matches(name, ids, _MAX_EPISODES_LISTED, cutoff=0.5):
        hint = f"similar ids: {', '.join(map(shorten, near))}"
    else:
        hint = f"examples of its ids: {_list_ids(entries)}"
    raise RecordError(f"the run has no episode {short_repr(name)}; {hint}")


def _list_ids(entries: Sequence[EpisodeEntry]) -> str:
    more = ", …" if len(entries) > _MAX_EPISODES_LISTED else ""
    return ", ".join(shorten(entry.episode_id) for entry in entries[:_MAX_EPISODES_LISTED]) + more
