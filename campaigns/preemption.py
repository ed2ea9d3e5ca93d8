"""Preempt runs with SIGTERM in each of eight phases, start them again, and compare their records.

A scheduler that takes a machine away sends SIGTERM. Then a run saves its last complete step and exits with 143, and
the same command resumes it. For each phase, the campaign starts a run, sends the signal in the middle of the phase, and
lets the run end in a second process. Its record is compared with that of an uninterrupted run. On verl and trinity,
sampled tokens may differ between runs, so only missing and doubled rows count there. Prints one line of JSON per phase
and one at the end, and exits with 1 if there is a fault.

    python -m campaigns.preemption [--backbone local] [--python INTERPRETER] [--chain] [--keep FOLDER]

INTERPRETER is that of the backbone's environment, and this one by default. With `--chain`, one run is preempted in all
phases, one after another, and its record is compared at the end. This needs half the starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.kill_campaign import create_model
from campaigns.observed_run import ObservedRun
from campaigns.serial_run import compare, write_job

PHASES = {
    "reading the tasks": ("read_tasks", 1),
    "loading the model": ("load_model", 1),
    "the first validation": ("validation", 1),
    "a rollout": ("rollout", 2),
    "an update": ("update", 2),
    "a sync of weights": ("sync_weights", 2),
    "saving a checkpoint": ("save_checkpoint", 1),
    "the last validation": ("validation", 5),
}
"""The astuner's phase, and which of its blocks, by the name in the report."""
CHAINED = (1, 1, 1, 2, 1, 2, 1, 1)
"""The same blocks in a run that has been preempted in all phases before: each process starts to count anew."""
DIFFERENCES = ("lost", "extra", "doubled", "different", "leftovers")


def preempt(run: ObservedRun, whole: Path, phase: str, number: int, delay: float) -> dict[str, Any]:
    """Preempt a run, let it end, and return the facts of the report."""
    code, _ = run.execute(phase, number, delay)
    return {"exit_code": code, "leftover_processes": run.leftovers(), **finish(run, whole)}


def finish(run: ObservedRun, whole: Path) -> dict[str, Any]:
    """Let a preempted run end, and return the second half of the facts."""
    code, _ = run.execute()
    facts: dict[str, Any] = {"second_exit_code": code, "resumed_from": run.resumed_from()}
    if code == 0:
        comparison = compare(whole, run.record)
        facts |= {name: len(getattr(comparison, name)) for name in DIFFERENCES}
    return facts


def separately(yaml: Path, folder: Path, python: str, whole: ObservedRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """Preempt one run per phase, and yield the phases with their facts."""
    seconds = whole.durations()
    for title, (phase, number) in PHASES.items():
        run = ObservedRun(yaml, folder / title.replace(" ", "_"), python)
        yield title, preempt(run, whole.record, phase, number, seconds[phase, number] / 2)


def in_a_chain(yaml: Path, folder: Path, python: str, whole: ObservedRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """Preempt one run in all phases, and yield the phases with their facts; those of the last one have the end's."""
    seconds = whole.durations()
    run = ObservedRun(yaml, folder / "chain", python)
    for (title, (phase, number)), chained in zip(PHASES.items(), CHAINED, strict=True):
        code, _ = run.execute(phase, chained, seconds[phase, number] / 2)
        facts = {"exit_code": code, "started_from": run.resumed_from(), "leftover_processes": run.leftovers()}
        yield title, facts if title != [*PHASES][-1] else facts | finish(run, whole.record)


def is_faulty(facts: dict[str, Any], *, is_exact: bool) -> bool:
    """Return whether a run did not exit with 143, did not end, left something, or lost or doubled a row."""
    names = ("leftover_processes", "second_exit_code", "lost", "extra", "doubled", "leftovers")
    names += ("different",) if is_exact else ()
    return facts["exit_code"] != 143 or any(facts.get(name) for name in names)


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=("local", "verl", "trinity"), default="local")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the backbone's environment")
    parser.add_argument("--chain", action="store_true", help="preempt one run in all phases, one after another")
    parser.add_argument("--keep", type=Path, help="folder for the records, which are removed without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yaml = write_job(folder, create_model(folder), backbone=options.backbone)
        whole = ObservedRun(yaml, folder / "whole", options.python)
        code, printed = whole.execute()
        if code != 0:
            sys.exit(f"the uninterrupted run ended with {code}:\n{printed}")
        faults = []
        preempt_all = in_a_chain if options.chain else separately
        for title, facts in preempt_all(yaml, folder, options.python, whole):
            print(json.dumps({"backbone": options.backbone, "phase": title, **facts}), flush=True)
            faults += [title] if is_faulty(facts, is_exact=options.backbone == "local") else []
    print(json.dumps({"backbone": options.backbone, "phases": len(PHASES), "faults": faults}))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
