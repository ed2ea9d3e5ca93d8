"""The command: selects episodes and prints their explanation as text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from loguru import logger
from rich.progress import track

from astuner.analysis.explain.episode import EpisodeExplanation, explain_episode
from astuner.analysis.explain.run import RunExplanation, explain_run
from astuner.analysis.explain.text import print_episode, print_run
from astuner.errors import RecordError
from astuner.launcher.console import make_console
from astuner.run_record.episode_file import read_recorded_episode
from astuner.run_record.episodes import read_index
from astuner.run_record.jsonable import to_jsonable
from astuner.run_record.lookup import find_episode, find_run
from astuner.schema import Split
from astuner.system.redaction import redact


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
    """Print an explanation for a run, or for one of its episodes, on stdout.

    Args:
        run: The run's folder, or its name under `exp_dir`.
        episode: An episode's id, or an unambiguous prefix of it.
        exp_dir: Folder of the runs.
        step: Only explain the episodes of this step.
        split: Only explain the episodes of this split; by default `train` if there are training episodes, else `val`.
        certify: Whether to read every trained episode for the certificate.
        as_json: Print one JSON object.

    Raises:
        RecordError: If there is no such run, episode or step, or the record cannot be read.
    """
    folder = find_run(run, exp_dir)
    entries = read_index(folder, lambda error: logger.warning("skipped: {}", error))
    explanation: RunExplanation | EpisodeExplanation
    if episode is not None:
        entry = find_episode(episode, entries)
        explanation = explain_episode(str(folder), entry, read_recorded_episode(folder / entry.path))
    else:
        if not entries:
            raise RecordError(f"the run in {folder} has no episodes (supervised training runs none)")
        if split is None:
            split = "train" if any(entry.split == "train" for entry in entries) else "val"
        of_split = [entry for entry in entries if entry.split == split]
        if not of_split:
            raise RecordError(f"the run in {folder} has no episodes of split {split!r}; omit --split")
        selected = [entry for entry in of_split if step is None or entry.step == step]
        if not selected:
            steps = sorted({entry.step for entry in of_split})
            existing = f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
            if len(steps) <= 10:
                existing = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
            raise RecordError(f"the run in {folder} has no {split} episodes of step {step}: it has {existing}")
        progress = make_console()
        is_hidden = not (certify and progress.is_terminal)
        tracked = track(selected, "reading episodes", console=progress, transient=True, disable=is_hidden)
        explanation = explain_run(folder, split, tracked, certify=certify)
    console = make_console(stderr=False)
    if as_json:
        # ASCII only, so that any terminal can print any text of a record.
        text = json.dumps(to_jsonable(asdict(explanation), redact), indent=2)
        console.print(text, markup=False, soft_wrap=True)
    elif isinstance(explanation, RunExplanation):
        print_run(console, explanation)
    else:
        print_episode(console, explanation)
