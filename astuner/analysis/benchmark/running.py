"""The runs of a suite: entries × backbones × seeds, each a process with its own record, several at a time."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from loguru import logger

from astuner.analysis.benchmark.results import SeedResult, outdated_versions, read_seed
from astuner.analysis.benchmark.suite import Suite, SuiteEntry
from astuner.config.data import MixturePart, TaskReaderConfig
from astuner.config.loading import BackboneChoice, load_config, resolve_names
from astuner.config.section import BackboneName
from astuner.config.yaml_file import to_yaml
from astuner.errors import ConfigError, InstallError, RecordError
from astuner.installer.reexec import check_environment
from astuner.launcher.resume import can_resume, recorded_changes
from astuner.processes.guarded_process import GuardedProcess
from astuner.run_record.folder import is_record

_COMMAND: tuple[str, ...] = (sys.executable, "-m", "astuner")
_POLL_SECONDS = 0.2
# A run that is ended writes what it has first.
_GRACE_SECONDS = 30.0
_AFRESH = "astuner.trainer_common.resume"
# The names differ between any two runs. The samples and updates of a run do not depend on whether it may resume.
_IGNORED = ("astuner.experiment_name", "astuner.experiment_dir", _AFRESH)
_OPTIONS = {
    "astuner.experiment_name": "`name` of the entry",
    "astuner.experiment_dir": "--output",
    "astuner.backbone": "--backbones, or `backbones` of the entry",
}
"""The options that set the keys whose values differ between the runs."""

Start = Literal["new", "kept", "resumed", "restarted", "outdated"]
"""How a run starts.

- `new`: it has no record.
- `kept`: it is finished and does not start.
- `resumed`: from its checkpoint.
- `restarted`: from the beginning, because its record cannot be continued.
- `outdated`: from the beginning, because its record has other versions.
"""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of a suite. Its record lies in the folder `records`."""

    entry: SuiteEntry
    backbone: str
    seed: int
    records: Path

    @property
    def name(self) -> str:
        """Name of both the run and its record."""
        return f"{self.entry.name}-{self.backbone}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run's record."""
        return self.records / self.name

    @property
    def log(self) -> Path:
        """The file with the output of the run's command."""
        return self.records / f"{self.name}.log"

    @property
    def overrides(self) -> tuple[str, ...]:
        """All overrides of the run's configuration."""
        entry = self.entry
        return (f"astuner.experiment_name={self.name}", *entry.overrides, f"{entry.seed_key}={self.seed}")

    @property
    def arguments(self) -> list[str]:
        """The arguments of the run's `astuner` command."""
        options = ["--conf", self.entry.conf, "--backbone", self.backbone, "--exp-dir", str(self.records)]
        return [*options, *self.overrides]

    def start(self, *, rerun_outdated: bool = False) -> Start:
        """Return how the run starts, from the contents of its folder. The log reports the reason and the changed keys.

        With `rerun_outdated`, a run starts again if its record has another git revision or other versions (see
        `outdated_versions`).

        Raises:
            ConfigError: its configuration is invalid, or has no validation before training.
        """
        try:
            loaded = load_config(Path(self.entry.conf), self.overrides, self.backbone)
            config = resolve_names(loaded.config, loaded.path, self.records)
        except ConfigError as error:
            # The suite's overrides are on the command line of the run.
            raise ConfigError(f"the command of {self.name} is not valid: {error}") from error
        if not config.astuner.trainer_common.val_before_train:
            raise ConfigError(
                f"the entry {self.entry.name!r} of the suite does not validate the starting model; set "
                "astuner.trainer_common.val_before_train=True in its overrides or with --set"
            )
        reader = config.astuner.task_reader
        if not any(_has_validation(part) for part in (reader.mixture if reader.type == "mixture" else [reader])):
            raise ConfigError(
                f"the entry {self.entry.name!r} of the suite has no validation tasks; set them under "
                f"astuner.task_reader in {self.entry.conf} or in its overrides"
            )
        if not is_record(self.folder):
            return "new"
        if rerun_outdated and outdated_versions(self.folder, self.backbone):
            return "outdated"
        config_yaml, config_dir = to_yaml(config, redacted=True), loaded.path.absolute().parent
        changes = recorded_changes(self.folder, config_yaml, config_dir)
        is_same = changes is not None and all(change.key in _IGNORED for change in changes)
        if is_same and _outcome(self, "kept", 0).result is not None:
            return "kept"
        return "resumed" if can_resume(self.folder, config_yaml, config_dir) else "restarted"


def _has_validation(reader: TaskReaderConfig | MixturePart) -> bool:
    """Return False if the configuration of a reader sets no validation tasks."""
    match reader.type:
        case "dataset_file":
            return bool(reader.dataset_file.validation.file_path)
        case "huggingface_dat_repo":
            return reader.huggingface_dat_repo.validation_split is not None
        case "env_service":
            return reader.env_service.validation_split is not None
        case "random_dummy":
            return reader.random_dummy.validation_tasks > 0
        case "seeds":
            return reader.validation_count > 0
    return True


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run: its numbers (`result`), or why it failed."""

    run: BenchRun
    start: Start
    result: SeedResult | None
    failure: str | None = None


def plan_runs(
    suite: Suite,
    records: Path,
    *,
    seeds: int | None = None,
    backbones: Sequence[str] = (),
    entries: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[BenchRun]:
    """Return the runs of a suite: by entry, backbone and seed.

    Args:
        suite: the suite, whose records lie in the folder `records`.
        seeds: number of seeds for each entry, from 1; None for the entry's own seeds.
        backbones: run only on these, except where an entry excludes them; if empty, on each entry's own backbones.
        entries: only the runs of these; all if empty.
        overrides: `KEY=VALUE` for all runs, after those of the entries.

    Raises:
        ConfigError: an entry does not exist, an override sets a key that differs between the runs, or no run is left.
    """
    names = [entry.name for entry in suite.entries]
    if unknown := [name for name in entries if name not in names]:
        raise ConfigError(f"the suite {suite.name!r} has no entry {unknown[0]!r}; its entries are {', '.join(names)}")
    runs = []
    for entry in suite.entries:
        if entries and entry.name not in entries:
            continue
        chosen = entry.model_copy(update={"overrides": (*entry.overrides, *overrides)})
        options = {**_OPTIONS, entry.seed_key: "--seeds, or `seeds` of the entry"}
        for override in chosen.overrides:
            if option := options.get(override.partition("=")[0].strip().lstrip("+~")):
                raise ConfigError(
                    f"the override {override!r} in the entry {entry.name!r} sets a key that differs between the runs "
                    f"of `astuner bench`; use {option} instead"
                )
        numbers = entry.seeds if seeds is None else range(1, seeds + 1)
        possible = entry.backbones or tuple(backbones) or ("local",)
        if excluded := [backbone for backbone in backbones if backbone not in possible]:
            logger.warning(
                "the entry {} is not run on {}: its `backbones` in the suite are {}",
                entry.name, ", ".join(excluded), ", ".join(possible),
            )  # fmt: skip
        runs += [
            BenchRun(chosen, backbone, seed, records)
            for backbone in possible
            if not backbones or backbone in backbones
            for seed in numbers
        ]
    if not runs:
        raise ConfigError(
            f"no run of the suite {suite.name!r} is left: no chosen entry runs on {', '.join(backbones)}; "
            "add it to an entry's `backbones`"
        )
    return runs


def run_suite(
    runs: Sequence[BenchRun], jobs: int, report: Callable[[str], None], *, rerun_outdated: bool = False
) -> list[RunOutcome]:
    """Run the unfinished runs, `jobs` at a time, and return the outcomes in the order of `runs`.

    A run that fails does not end the others. If this process is interrupted, the active runs are terminated;
    the next call resumes them from their checkpoints. A warning names the kept and resumed runs whose record has
    another git revision or other versions (see `outdated_versions`).

    `report` is called with one line for each start and end of a run. For `rerun_outdated`, see `BenchRun.start`.

    Raises:
        ConfigError: a configuration is invalid; no run has started then.
        InstallError: the environment of a backbone is not installed; no run has started then.
    """
    starts = {run.name: run.start(rerun_outdated=rerun_outdated) for run in runs}
    first = {run.backbone: run for run in reversed(runs) if starts[run.name] != "kept"}
    for run in first.values():
        try:
            check_environment(BackboneChoice(cast(BackboneName, run.backbone)))
        except InstallError as error:
            raise InstallError(f"{run.name} cannot run: {error}") from error
    _warn_of_versions([run for run in runs if starts[run.name] in ("kept", "resumed")])
    outcomes: dict[str, RunOutcome] = {}
    waiting = []
    for run in runs:
        if starts[run.name] == "kept":
            outcomes[run.name] = _outcome(run, "kept", 0)
            report(f"{run.name}: {_ending(outcomes[run.name])}")
        else:
            waiting.append(run)
    count = len(runs)
    active: dict[str, tuple[BenchRun, GuardedProcess, float]] = {}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                report(f"{run.name}: {_BEGINNINGS[starts[run.name]]}; its output is in {run.log}")
                active[run.name] = (run, _launch(run, starts[run.name]), time.monotonic())
            for run, process, started in [*active.values()]:
                if process.exit_code is None:
                    continue
                process.end()
                del active[run.name]
                outcome = _outcome(run, starts[run.name], process.exit_code)
                outcomes[run.name] = outcome
                seconds = time.monotonic() - started
                report(f"[{len(outcomes)}/{count}] {run.name}: {_ending(outcome)} ({seconds:.0f} s)")
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        report("interrupted; run the same command again to continue")
        raise
    finally:
        for _, process, _ in active.values():
            process.request_end()
        for _, process, _ in active.values():
            process.end()
    return [outcomes[run.name] for run in runs]


_BEGINNINGS: dict[Start, str] = {
    "new": "starts",
    "kept": "is finished",
    "resumed": "continues from its last checkpoint",
    "restarted": "starts again, because its record cannot be continued; the earlier record is kept under another name",
    "outdated": "starts again, because its record has other versions; the earlier record is kept under another name",
}


def _warn_of_versions(runs: Sequence[BenchRun]) -> None:
    names: dict[str, list[str]] = {}
    for run in runs:
        if differing := outdated_versions(run.folder, run.backbone):
            names.setdefault(", ".join(differing), []).append(run.name)
    for changes, outdated in names.items():
        logger.warning(
            "{}: recorded with other versions than a run that starts now: {}; --rerun-outdated starts such runs again",
            ", ".join(outdated), changes,
        )  # fmt: skip


def _launch(run: BenchRun, start: Start) -> GuardedProcess:
    run.records.mkdir(parents=True, exist_ok=True)
    arguments = [*run.arguments, f"{_AFRESH}=False"] if start == "outdated" else run.arguments
    with run.log.open("ab") as log:
        log.write(f"$ {shlex.join(['astuner', *arguments])}\n".encode())
        log.flush()
        return GuardedProcess([*_COMMAND, *arguments], Path.cwd(), os.environ, output=log, grace=_GRACE_SECONDS)


def _outcome(run: BenchRun, start: Start, exit_code: int) -> RunOutcome:
    if exit_code:
        # The last command's error message, of which the first line is reported.
        output = run.log.read_text(errors="replace").rpartition("\n$ astuner ")[2]
        errors = [f", {line}" for line in output.splitlines() if line.startswith("error: ")]
        message = f"exit code {exit_code}{''.join(errors[-1:])}; its output is in {run.log}"
        return RunOutcome(run, start, None, message)
    try:
        return RunOutcome(run, start, read_seed(run.folder, run.seed))
    except RecordError as error:
        return RunOutcome(run, start, None, str(error))


def _ending(outcome: RunOutcome) -> str:
    if outcome.result is None:
        return f"failed: {outcome.failure}"
    word = "finished earlier, kept" if outcome.start == "kept" else "finished"
    return f"{word}, success {outcome.result.before:.1%} → {outcome.result.after:.1%}"
