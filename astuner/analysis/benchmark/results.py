"""A benchmark's result files, one per suite entry and backbone, made from its runs' records; and the runs' versions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from astuner.analysis.benchmark.statistics import bootstrap_interval, curve_mean
from astuner.analysis.benchmark.suite import SuiteEntry, describe_problems
from astuner.errors import RecordError
from astuner.installer.env_dir import EnvDir
from astuner.installer.reexec import missing_packages
from astuner.run_record.files import write_atomically
from astuner.run_record.folder import current_environment
from astuner.run_record.metrics import read_metrics
from astuner.run_record.recorded_run import RecordedRun, environments_of
from astuner.run_record.summary import TokensSummary
from astuner.system.redaction.redactor import redact

_ROUNDING = 0.001
"""Largest error of `mean_gain` in a file, so that other programs' files can contain rounded numbers."""

Rate = Annotated[float, Field(ge=0, le=1)]


Versions = Mapping[str, str | list[str]]
"""Version by name; a list if there are several."""

_MACHINE = ("machine", "processor", "cpus")
"""Names that describe the machine. Results of different machines differ only by rounding."""


def recorded_versions(records: Sequence[Path]) -> dict[str, str | list[str]]:
    """Return the versions under which runs were recorded."""
    collected: dict[str, dict[str, None]] = {}
    for folder in records:
        for environment in environments_of(folder):
            for name, value in _versions(environment).items():
                collected.setdefault(name, {})[value] = None
    return {name: next(iter(values)) if len(values) == 1 else [*values] for name, values in collected.items()}


def outdated_versions(record: Path, backbone: str) -> list[str]:
    """Return the versions in a run's record that differ from those for a run that starts now, as `NAME OLD → NEW`.

    Names that the record does not contain are left out, and so is the machine.
    """
    recorded = {name: value for name, value in recorded_versions([record]).items() if name not in _MACHINE}
    now = _current_versions(backbone)
    return changed_versions(recorded, {name: now[name] for name in recorded if name in now}) if now else []


def changed_versions(a: Versions, b: Versions) -> list[str]:
    """Return the versions that differ, as `NAME A → B`."""
    return [
        f"{name} {_text(a.get(name))} → {_text(b.get(name))}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _text(version: str | Iterable[str] | None) -> str:
    return version if isinstance(version, str) else " and ".join(version or ["absent"])


def _current_versions(backbone: str) -> dict[str, str]:
    """Return the versions of a run that starts now; {} if the backbone's own environment is not installed."""
    if not missing_packages(backbone):
        return _versions(current_environment())
    env_dir = EnvDir.of(backbone)
    manifest = env_dir.manifest()
    if manifest is None:
        return {}
    packages = [str(folder) for folder in env_dir.folder.glob("lib/python*/site-packages")]
    return _versions(current_environment(packages) | {"python": manifest.python})


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    git = environment.get("git") or {}
    revision = f"{git['revision'][:12]}{' with changes' if git.get('dirty') else ''}" if git.get("revision") else None
    named = {
        "astuner": environment.get("astuner"),
        "revision": revision,
        "python": environment.get("python"),
        **environment.get("packages", {}),
        "machine": environment.get("machine"),
        "processor": environment.get("processor"),
        "cpus": environment.get("cpus"),
    }
    return {name: str(value) for name, value in named.items() if value is not None}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SeedResult(_Part):
    """One run."""

    seed: NonNegativeInt
    """Seed of the run."""
    before: Rate
    """Success rate of the starting model on the held-out tasks."""
    after: Rate
    """Success rate of the tuned model on the held-out tasks."""
    seconds: NonNegativeFloat
    """Seconds from the process's start to the run's end, with those of the processes before a resume."""
    steps: NonNegativeInt | None = None
    """Training steps; None if they are not known. `astuner bench` writes this field and the following ones."""
    episodes: NonNegativeInt | None = None
    """Episodes of each validation; None if they are not known."""
    tokens: TokensSummary | None = None
    """Token counts of the training episodes; None if they are not known."""
    curve: tuple[tuple[NonNegativeInt, Rate], ...] = ()
    """Step and success rate of each validation, by ascending step; () if they are not known."""
    sources: dict[str, tuple[Rate, Rate]] = {}
    """Success before and after on each mixture reader's tasks; omitted from the file without a mixture."""

    @model_serializer(mode="wrap")
    def _omit_empty(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(default(self), "sources")

    @property
    def gain(self) -> float:
        """Success after minus success before."""
        return self.after - self.before

    @property
    def curve_mean(self) -> float | None:
        """Mean height of the validation curve; None without a validation during training."""
        return curve_mean(self.curve)


class SourceGain(_Part):
    """The gain on one mixture reader's tasks."""

    before: Rate
    """Mean over the seeds of the starting model's success rate."""
    after: Rate
    """Mean over the seeds of the tuned model's success rate."""
    mean_gain: float
    """Mean of success after minus success before, over the seeds."""
    ci95: tuple[float, float] | None
    """Bootstrap interval of the mean gain; None for one seed."""


class BenchResult(_Part):
    """The content of a result file."""

    suite: str
    """Name of the suite's entry."""
    backbone: str
    """Backbone of the runs."""
    model: str
    """Starting model."""
    command: str
    """Command of a run, without its name and folder; SEED stands for the seed."""
    date: str = ""
    """Day on which the last run started, such as 2026-11-24; omitted from the file if it is not known."""
    versions: dict[str, str | list[str]]
    """Versions of astuner, Python, packages and the machine; a list if they differ between the runs."""
    seeds: Annotated[tuple[SeedResult, ...], Field(min_length=1)]
    """The runs, by ascending seed."""
    failed_seeds: tuple[NonNegativeInt, ...] = ()
    """Seeds whose run failed; they are in no number of this file."""
    mean_gain: float
    """Mean of success after minus success before, over the seeds."""
    ci95: tuple[float, float] | None
    """Bootstrap interval of the mean gain; None for one seed."""
    sources: dict[str, SourceGain] = {}
    """The gain on each mixture reader's tasks; omitted from the file without a mixture."""
    note: str = ""
    """Remark on the measurement, written by hand."""

    @model_serializer(mode="wrap")
    def _omit_empty(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(_without(default(self), "sources"), "date")

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        numbers = [result.seed for result in self.seeds]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"the seeds are {numbers}; expected each once, in ascending order")
        gains = [result.gain for result in self.seeds]
        if abs(self.mean_gain - sum(gains) / len(gains)) > _ROUNDING:
            raise ValueError(f"mean_gain is {self.mean_gain}, but the mean over the seeds is {sum(gains) / len(gains)}")
        if self.ci95 is not None and self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95 is {[*self.ci95]}; expected the lower end first")
        return self

    @property
    def name(self) -> str:
        """Stem of the result file."""
        return f"{self.suite}-{self.backbone}"

    def until(self, step: int) -> BenchResult:
        """Return the result of the first steps: with the curves up to a step, and the success there as that after.

        These steps' learning rate must not depend on the total number of steps. Seconds and tokens remain those
        of the whole runs. The result has no `sources`.

        Raises:
            RecordError: If a seed has no validation after this step.
        """
        seeds = []
        for seed in self.seeds:
            curve = tuple(point for point in seed.curve if point[0] <= step)
            if not curve or curve[-1][0] != step:
                steps = ", ".join(str(number) for number, _ in seed.curve)
                raise RecordError(
                    f"{self.name} has no validation after step {step} for seed {seed.seed}; it has some at {steps}"
                )
            seeds.append(seed.model_copy(update={"after": curve[-1][1], "steps": step, "curve": curve, "sources": {}}))
        return self.model_copy(update={"seeds": tuple(seeds), **_statistics(seeds)})

    def of_seeds(self, numbers: Collection[int]) -> BenchResult:
        """Return the result for some of the seeds; `RecordError` if one has no result."""
        seeds = [result for result in self.seeds if result.seed in numbers]
        if missing := sorted({*numbers} - {result.seed for result in seeds}):
            raise RecordError(f"{self.name} has no result of the seeds {', '.join(map(str, missing))}")
        return self.model_copy(update={"seeds": tuple(seeds), **_statistics(seeds)})


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a model without field `name` if it is empty."""
    return {key: value for key, value in values.items() if key != name or value}


def bench_result(entry: SuiteEntry, backbone: str, model: str, versions: dict[str, Any], seeds: Sequence[SeedResult],
                 failed_seeds: Sequence[int] = (), date: str = "") -> BenchResult:  # fmt: skip
    """Return an entry's result over its seeds on a backbone, with mean and interval."""
    by_seed = sorted(seeds, key=lambda result: result.seed)
    return BenchResult(
        suite=entry.name,
        backbone=backbone,
        model=redact(model),
        command=command_of(entry, backbone),
        date=date,
        versions=versions,
        seeds=tuple(by_seed),
        failed_seeds=tuple(sorted(failed_seeds)),
        **_statistics(by_seed),
    )


def command_of(entry: SuiteEntry, backbone: str) -> str:
    """Return the command for an entry's runs, without their name and folder; SEED stands for the seed."""
    words = ["astuner", "--conf", entry.conf, "--backbone", backbone, *entry.overrides, f"{entry.seed_key}=SEED"]
    return redact(shlex.join(words))


def _statistics(seeds: Sequence[SeedResult]) -> dict[str, Any]:
    """Return mean_gain, ci95 and sources."""
    mean_gain, interval = _mean_gain([(result.before, result.after) for result in seeds])
    gains = {}
    for source in seeds[0].sources:
        if all(source in seed.sources for seed in seeds):
            ends = [seed.sources[source] for seed in seeds]
            before, after = (round(sum(column) / len(ends), 9) for column in zip(*ends, strict=True))
            gain, gain_interval = _mean_gain(ends)
            gains[source] = SourceGain(before=before, after=after, mean_gain=gain, ci95=gain_interval)
    return {"mean_gain": mean_gain, "ci95": interval, "sources": gains}


def _mean_gain(ends: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float] | None]:
    """Return the mean of after minus before over the seeds, and its interval, rounded for a file."""
    gains = [after - before for before, after in ends]
    interval = bootstrap_interval(gains)
    bounds = None if interval is None else (round(interval[0], 9), round(interval[1], 9))
    return round(sum(gains) / len(gains), 9), bounds


def result_of(
    entry: SuiteEntry, backbone: str, records: dict[int, Path], failed_seeds: Sequence[int] = ()
) -> BenchResult | None:
    """Return an entry's result on a backbone from the folders of finished runs by seed; None without a finished run.

    Raises:
        RecordError: If a record has no validation before and after training.
    """
    if not records:
        return None
    seeds = [read_seed(folder, seed) for seed, folder in records.items()]
    facts = [RecordedRun(folder) for folder in records.values()]
    date = f"{datetime.fromtimestamp(max(run.started for run in facts), UTC):%Y-%m-%d}"
    versions = recorded_versions([*records.values()])
    return bench_result(entry, backbone, facts[0].model or "", versions, seeds, failed_seeds, date)


def read_seed(folder: Path, seed: int) -> SeedResult:
    """Return the result of a run from its record.

    Raises:
        RecordError: If the run is not finished, or has no validation before and after training.
    """
    summary = RecordedRun(folder).summary
    if summary is None:
        raise RecordError(f"{folder} has no summary, because the run has not finished; run it again to finish it")
    before, after = summary.validation.before, summary.validation.after
    ends: list[tuple[float, int]] = []
    for word, end in (("before", before), ("after", after)):
        if end is None or end.success_rate is None:
            raise RecordError(
                f"{folder} has no success rate {word} training; a benchmark needs validation tasks and "
                "astuner.trainer_common.val_before_train=True"
            )
        ends.append((end.success_rate, end.episodes))
    rows = [row for row in read_metrics(folder, lambda _: None) if row.metrics.get("val/success_rate") is not None]
    curve = {row.step: row.metrics["val/success_rate"] or 0.0 for row in rows}
    # The first and the last validation's success rates, by mixture reader.
    prefix = "val/success_rate/"
    sources = {
        name.removeprefix(prefix): (round(first, 9), round(last, 9))
        for name, first in (rows[0].metrics if rows else {}).items()
        if name.startswith(prefix) and first is not None and (last := rows[-1].metrics.get(name)) is not None
    }
    return SeedResult(
        seed=seed,
        before=round(ends[0][0], 9),
        after=round(ends[1][0], 9),
        seconds=round(summary.seconds, 1),
        steps=summary.steps,
        episodes=ends[1][1],
        tokens=summary.tokens,
        curve=tuple((step, round(rate, 9)) for step, rate in sorted(curve.items())),
        sources=sources,
    )


def write_result(folder: Path, result: BenchResult) -> Path:
    """Write a result's file into `folder`, and return its path; `RecordError` if that fails."""
    path = folder / f"{result.name}.json"
    text = json.dumps(result.model_dump(mode="json"), indent=1)
    # One line per run, so that a changed result is readable as a difference of lines.
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("   ") and lines:
            lines[-1] += (" " if lines[-1].endswith(",") else "") + line.strip()
        elif line.startswith(("  }", "  ]")) and lines:
            lines[-1] += line.strip()
        else:
            lines.append(line)
    write_atomically(path, "\n".join(lines).encode() + b"\n")
    return path


def read_results(path: Path) -> list[BenchResult]:
    """Return the results in a file, or in all JSON files of a folder, by name.

    Raises:
        RecordError: If there is no result, a file is damaged, or two files are results of one entry and backbone.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        hint = f"; did you mean {path / 'results'}?" if (path / "results").is_dir() else ""
        raise RecordError(f"{path} contains no result; expected JSON files of `astuner bench`{hint}")
    results: dict[str, tuple[Path, BenchResult]] = {}
    for file in files:
        try:
            result = BenchResult.model_validate_json(file.read_bytes())
        except OSError as error:
            raise RecordError(f"cannot read {file}: {error.strerror or error}") from error
        except ValidationError as error:
            problems = describe_problems(error, BenchResult, "file")
            raise RecordError(f"{file} is not a result of `astuner bench`:\n{problems}") from error
        if result.name in results:
            raise RecordError(
                f"{results[result.name][0]} and {file} are both results of {result.suite} on {result.backbone}; "
                "expected one of them"
            )
        results[result.name] = file, result
    return [result for _, result in results.values()]
