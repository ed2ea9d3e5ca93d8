"""The command itself: finds what is meant, and prints it as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track

from astuner.errors import RecordError
from astuner.launcher.console import make_console
from astuner.launcher.explain.episode import EpisodeExplanation, explain_episode
from astuner.launcher.explain.episode_text import print_episode
from astuner.launcher.explain.run import RunExplanation, explain_run
from astuner.launcher.explain.run_text import print_run
from astuner.run_record import EpisodeEntry, Split, find_episode, find_run, read_index, read_recorded_episode, redact
from astuner.run_record.plain import to_plain


def explain(
    run: str,
    episode: str | None,
    exp_dir: Path,
    *,
    step: int | None = None,
    split: Split | None = None,
    certify: bool = True,
    as_json: bool = False,
) -> None:
    """Print the account of a run, or of one of its episodes, on stdout.

    Args:
        run: the run's folder, or its name under `exp_dir`.
        episode: an episode's id, or how it alone begins.
        exp_dir: where runs are.
        step, split: account for these episodes of a run only; without a split for `train`, where there are any.
        certify: whether to read every trained episode of a run for the certificate.
        as_json: print one JSON object.

    Raises:
        RecordError: there is no such run, episode or step, or the record cannot be read.
    """
    folder = find_run(run, exp_dir)
    entries = read_index(folder)
    if episode is not None:
        entry = find_episode(episode, entries)
        _print(explain_episode(str(folder), entry, read_recorded_episode(folder / entry.path)), as_json=as_json)
        return
    split, chosen = _chosen(folder, entries, step, split)
    _print(explain_run(folder, split, _watched(chosen, shown=certify), certify=certify), as_json=as_json)


def _chosen(
    folder: Path, entries: Sequence[EpisodeEntry], step: int | None, split: Split | None
) -> tuple[Split, Sequence[EpisodeEntry]]:
    if not entries:
        raise RecordError(f"the run in {folder} has recorded no episode (supervised training runs none)")
    if split is None:
        split = "train" if any(entry.split == "train" for entry in entries) else "val"
    of_split = [entry for entry in entries if entry.split == split]
    if not of_split:
        raise RecordError(f"the run in {folder} has no episodes of split {split!r}; leave --split out")
    chosen = [entry for entry in of_split if step is None or entry.step == step]
    if not chosen:
        steps = sorted({entry.step for entry in of_split})
        raise RecordError(f"the run in {folder} has no {split} episodes of step {step}: it has {_ranges(steps)}")
    return split, chosen


def _ranges(steps: Sequence[int]) -> str:
    if len(steps) <= 10:
        return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _watched(entries: Sequence[EpisodeEntry], *, shown: bool) -> Iterator[EpisodeEntry]:
    """Go through entries beside a progress bar, where somebody sees it."""
    console = make_console()
    bar: Iterable[EpisodeEntry] = track(
        entries, "reading episodes", console=console, transient=True, disable=not (shown and console.is_terminal)
    )
    yield from bar


def _print(explanation: RunExplanation | EpisodeExplanation, *, as_json: bool) -> None:
    console = make_console(stderr=False)
    if as_json:
        _print_json(console, explanation)
    elif isinstance(explanation, RunExplanation):
        print_run(console, explanation)
    else:
        print_episode(console, explanation)


def _print_json(console: Console, explanation: RunExplanation | EpisodeExplanation) -> None:
    # In ASCII, so that any terminal and any text that a record can hold go together.
    text = json.dumps(to_plain(asdict(explanation), redact), indent=2)
    console.print(text, markup=False, soft_wrap=True)
