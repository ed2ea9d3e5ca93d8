"""Run the commands of the tutorials' READMEs in a fresh clone and a fresh virtual environment, in a short form.

The clone has the committed state of this repository. One environment has astuner and the extras that the READMEs name.
A command `astuner --conf …` runs twice: for one batch on the backbone debug, and for one training step on its own
backbone, with two tasks and two episodes each. Other commands run as they are. The
cache folder is empty, so that each starting model is created; `--cache ~/.cache` uses the models of earlier runs.
Commands that need a GPU, data, or programs that pip does not install are skipped, and the output names the reason.

    python -m campaigns.tutorial_commands FOLDER [--only NAME ...] [--timeout 1800] [--cache CACHE]

FOLDER keeps the clone, the environment, the cache and a log of each command. Prints one line of JSON after each command
and a table at the end, and exits with 1 if a command failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.processes.guarded_process import GuardedProcess

ROOT = Path(__file__).parents[1]

SKIPPED = {
    "appworld": "needs AppWorld's data and a GPU",
    "harnesses": "needs the coding agents that .ci/harnesses installs",
}
"""Why the commands of a tutorial are skipped."""

_SETTINGS = ("data.train_batch_size=2", "rollout.num_repeat=2", "trainer_common.total_training_steps=1")
SHORT = " ".join(f"astuner.{setting}" for setting in (*_SETTINGS, "trainer_common.val_before_train=False"))
"""Overrides of a short run."""

_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "HF_HUB_OFFLINE", "PIP_CONSTRAINT")
"""Environment variables of the caller that a newcomer does not have."""

_FENCE = re.compile(r"^```(?:bash|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXTRA = re.compile(r'pip install [^`\n]*"(?:\.|astuner)\[([\w,-]+)\]"')


@dataclass(frozen=True)
class Tutorial:
    """The README of a tutorial.

    Attributes:
        name: Name of the folder without `example_`.
        extras: Extras of astuner that the README installs.
        commands: Commands that start with `astuner` or `python`.
    """

    name: str
    extras: tuple[str, ...]
    commands: tuple[str, ...]


def read_tutorial(folder: Path) -> Tutorial:
    """Return the extras and the commands of a tutorial's README."""
    text = (folder / "README.md").read_text()
    lines = [line.strip() for block in _FENCE.findall(text) for line in block.splitlines()]
    commands = tuple(line for line in lines if line.startswith(("astuner --conf", "python -m")))
    extras = tuple(extra for group in _EXTRA.findall(text) for extra in group.split(","))
    return Tutorial(folder.name.removeprefix("example_"), extras, commands)


def read_tutorials(root: Path = ROOT) -> list[Tutorial]:
    """Return the tutorials of a repository."""
    return [read_tutorial(folder) for folder in sorted((root / "tutorial").glob("example_*"))]


def short_forms(command: str) -> list[str]:
    """Return the short runs of a command: on the backbone debug, and one training step on its own backbone."""
    if not command.startswith("astuner --conf"):
        return [command]
    forms = [command] if "--backbone=" in command else [f"{command} --backbone=debug", command]
    return [f"{form} {SHORT}" for form in forms]


def create_environment(folder: Path, extras: list[str]) -> Path:
    """Clone the repository, install it with `extras` in a new virtual environment, and return the environment."""
    clone, environment = folder / "clone", folder / "venv"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    target = f"{clone}[{','.join(extras)}]" if extras else str(clone)
    install = [str(environment / "bin/pip"), "install", "--quiet", "-c", str(clone / "constraints.txt"), "-e", target]
    subprocess.run(install, check=True)
    return environment


def run_command(command: str, folder: Path, cache: Path, log: Path, timeout: float) -> dict[str, object]:
    """Run a command in the clone with the new environment, and return its exit code and duration in seconds.

    After `timeout` seconds, the command and its child processes are ended.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    environment["PATH"] = f"{folder / 'venv/bin'}{os.pathsep}{environment['PATH']}"
    environment["XDG_CACHE_HOME"] = str(cache)
    program, *arguments = shlex.split(command)
    started = time.monotonic()
    with log.open("wb") as output:
        argv = [str(folder / "venv/bin" / program), *arguments]
        process = GuardedProcess(argv, folder / "clone", environment, output=output)
        while process.exit_code is None and time.monotonic() - started < timeout:
            time.sleep(0.5)
        code = f"stopped after {timeout:g} s" if process.exit_code is None else process.exit_code
        process.end()
    return {"command": command, "code": code, "seconds": round(time.monotonic() - started), "log": str(log)}


def format_table(rows: Sequence[dict[str, object]]) -> str:
    """Return a Markdown table of the commands, without the overrides of a short run."""
    lines = ["| tutorial | command | exit code | seconds |", "|---|---|---|---|"]
    for row in rows:
        command = str(row.get("command", row.get("skipped", row.get("error")))).replace(SHORT, "").strip()
        lines.append(f"| {row['tutorial']} | {command} | {row.get('code', '-')} | {row.get('seconds', '-')} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", help="names of tutorials, without example_")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each command")
    parser.add_argument("--cache", type=Path, help="cache folder of the commands; by default, FOLDER/cache")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "venv").exists():
        create_environment(folder, sorted({extra for each in read_tutorials() for extra in each.extras}))
    tutorials = [each for each in read_tutorials(folder / "clone") if not arguments.only or each.name in arguments.only]
    cache = (arguments.cache or folder / "cache").expanduser().resolve()
    rows: list[dict[str, object]] = []

    def report(tutorial: Tutorial, **result: object) -> None:
        rows.append({"tutorial": tutorial.name, **result})
        print(json.dumps(rows[-1]), flush=True)

    for tutorial in tutorials:
        if reason := SKIPPED.get(tutorial.name):
            report(tutorial, skipped=reason)
            continue
        if not tutorial.commands:
            report(tutorial, error="the README has no command")
        forms = dict.fromkeys(form for command in tutorial.commands for form in short_forms(command))
        for number, form in enumerate(forms, 1):
            log = folder / f"{tutorial.name}_{number}.log"
            report(tutorial, **run_command(form, folder, cache, log, arguments.timeout))
    print(format_table(rows))
    return int(any("error" in row or row.get("code", 0) != 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
