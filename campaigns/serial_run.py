"""A short serial run of the local backbone in a separate process, and the differences between two of its records."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner import AstunerJob
from astuner.run_record import read_episode
from tests.preloaded import AstunerProcess

AGENTS = Path(__file__).parent / "agents.py"
LEFTOVERS = (".partial_*", ".earlier_*", ".removed_*", "*.tmp", "pending.jsonl", "*.damaged")
_PATIENCE = 300.0

Row = tuple[str, int, str]
"""Split, step and name of a row."""


def write_job(folder: Path, model: Path, agent: str = "TwoTurns", **settings: Any) -> Path:
    """Write the configuration of a run of 4 steps with 2 tasks × 2 episodes, and return its path."""
    for name, count in (("train", 4), ("val", 2)):
        rows = [{"question": f"{name} question {number}", "answer": ""} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "experiment_name": "run",
        "backbone": "local",
        "model__renderer": "qwen3",
        "update__pack": "leaf",
        "data__train_batch_size": 2,
        "rollout__num_repeat": 2,
        "rollout__max_env_worker": 1,
        "rollout__temperature": 1.0,
        "rollout__max_response_length_in_one_turn": 4,
        "rollout__max_model_len": 256,
        "rollout__compute_madness_checklist": [],
        "trainer_common__total_training_steps": 4,
        "trainer_common__save_freq": 2,
        "trainer_common__test_freq": 1,
        "trainer_common__val_before_train": True,
        "trainer_common__val_pass_n": 2,
        "trainer_common__max_checkpoints_to_keep": 1,
        "trainer_common__use_kl_loss": False,
        "trainer_common__optim__lr": 1e-2,
        "rollout__val_kwargs__temperature": 1.0,
        "rollout__val_kwargs__do_sample": True,
    }
    job = AstunerJob(algorithm="grpo", model=model, **(values | settings))
    job.set_workflow(f"{AGENTS}->{agent}")
    job.set_data("file", folder / "train.jsonl", validation_path=folder / "val.jsonl")
    return job.dump_job_as_yaml(folder / "run.yaml")


class Runs:
    """Starts runs of one configuration."""

    def __init__(self, yaml: Path) -> None:
        self.yaml = yaml

    def start(self, folder: Path, *words: str) -> AstunerProcess:
        """Start `astuner` with its record in `folder`; `words` are further arguments."""
        folder.mkdir(exist_ok=True)
        command = ("--conf", str(self.yaml), "--exp-dir", str(folder), *words)
        with (folder / "output.log").open("ab") as log:
            return AstunerProcess(*command, cwd=folder, output=log)

    def complete(self, folder: Path, *words: str) -> float:
        """Let a run end, and return its duration in seconds."""
        started = time.monotonic()
        process = self.start(folder, *words)
        try:
            process.wait(_PATIENCE)
        finally:
            process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"the run in {folder} ended with {process.returncode}; see its output.log")
        return time.monotonic() - started

    def kill_when(self, folder: Path, is_due: Callable[[int, float], bool], *words: str) -> bool:
        """Start a run and kill it with SIGKILL at a moment; return False if it ended before.

        Args:
            folder: the folder of the record.
            is_due: called after each change of the record and in between, with the number of changes so far and the
                seconds since the start.
            words: further arguments of the command.
        """
        started = time.monotonic()
        changes, files = 0, state_of(folder / "run")

        def is_reached() -> bool:
            nonlocal changes, files
            if (now := state_of(folder / "run")) != files:
                changes, files = changes + 1, now
            return is_due(changes, time.monotonic() - started)

        return self.kill_at(folder, is_reached, *words)

    def kill_at(self, folder: Path, is_reached: Callable[[], bool], *words: str) -> bool:
        """Start a run and kill it with SIGKILL once a condition is true; return False if it ended before."""
        process = self.start(folder, *words)
        while process.poll() is None:
            if is_reached():
                process.kill()
                return process.wait() == -9
            time.sleep(0.001)  # the run needs the processor more than this loop
        if process.returncode != 0:
            raise RuntimeError(f"the run in {folder} ended with {process.returncode}; see its output.log")
        return False


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and modification time of everything in a record, except for the log."""
    found, folders = {}, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if entry.name != "run.log":
                        found[entry.path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:  # removed in the meantime
            continue
    return found


@dataclass
class Comparison:
    """The differences of a record from that of an uninterrupted run.

    Attributes:
        rows: number of rows of the uninterrupted run: index, metrics, episode files and TensorBoard.
        lost, extra, doubled, different: rows that are missing, only here, there more than once, or have other tokens,
            rewards, advantages or losses.
        leftovers: files that a killed process left.
    """

    rows: int = 0
    lost: list[Row] = field(default_factory=list)
    extra: list[Row] = field(default_factory=list)
    doubled: list[Row] = field(default_factory=list)
    different: list[Row] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def add(self, expected: Iterable[Row], found: Iterable[Row]) -> None:
        """Compare the rows of one writer."""
        wanted, there = Counter(expected), Counter(found)
        assert max(wanted.values(), default=1) == 1, "the uninterrupted run has doubled rows"
        self.rows += len(wanted)
        self.lost += sorted(wanted.keys() - there.keys())
        self.extra += sorted(there.keys() - wanted.keys())
        self.doubled += sorted(row for row, count in there.items() if count > 1)

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.lost or self.extra or self.doubled or self.different or self.leftovers)


def compare(expected: Path, found: Path) -> Comparison:
    """Compare two records of the same configuration."""
    result = Comparison()
    for read in (_index, _metrics):
        wanted, there = read(expected), read(found)
        result.add((row for row, _ in wanted), (row for row, _ in there))
        values = dict(there)
        result.different += [row for row, content in wanted if row in values and values[row] != content]
    result.add(_episode_files(expected), _episode_files(found))
    result.add(_tensorboard(expected), _tensorboard(found))
    result.add(_checkpoints(expected), _checkpoints(found))
    result.leftovers = [str(path.relative_to(found)) for name in LEFTOVERS for path in found.rglob(name)]
    return result


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def _index(record: Path) -> list[tuple[Row, Any]]:
    rows = []
    for row in _lines(record / "episodes/index.jsonl"):
        calls = read_episode(record / row["path"]).calls
        tokens = [(call.prompt_ids, call.completion_ids, call.logprobs) for call in calls]
        content = (tokens, row["reward"], row["advantage"], row["status"], row["tokens_trained"])
        rows.append(((row["split"], row["step"], row["episode_id"]), content))
    return rows


def _metrics(record: Path) -> list[tuple[Row, Any]]:
    rows = []
    for row in _lines(record / "metrics.jsonl"):
        metrics = {name: value for name, value in row["metrics"].items() if not name.startswith("time/")}
        split = "val" if "val/reward" in metrics else "train"
        rows.append(((split, row["step"], "metrics"), metrics))
    return rows


def _episode_files(record: Path) -> list[Row]:
    files = (record / "episodes").glob("*/step_*/*.json")
    return [(file.parents[1].name, int(file.parent.name[5:]), file.name) for file in files]


def _checkpoints(record: Path) -> list[Row]:
    return [("checkpoint", 0, path.name) for path in (record / "checkpoints").iterdir()]


def _tensorboard(record: Path) -> list[Row]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(record / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return [("tensorboard", event.step, tag) for tag in tags for event in accumulator.Scalars(tag)]
