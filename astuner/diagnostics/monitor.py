"""Runs a run's checks, and reports their findings on the console and in the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import isfunction
from typing import Any, Literal, get_args

from loguru import logger

from astuner.config.root import AstunerConfig
from astuner.diagnostics.evidence import (
    StartEvidence,
    StepEvidence,
    UpdateEvidence,
    model_facts,
    probe_template,
)
from astuner.model_tuner.codec import ChatCodec
from astuner.run_record.findings import RunFinding, Severity
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, TaskSet

# The console repeats a finding that persists after this number of steps.
_REPEAT_AFTER = 20
Stage = Literal["start", "rollout", "update"]
_MODULES: Mapping[Stage, tuple[str, ...]] = {
    "start": ("start_checks",),
    "rollout": ("prompt_checks", "answer_checks", "reward_checks"),
    "update": ("update_checks",),
}
_WARNINGS = {
    "validation_in_training",
    "duplicate_tasks",
    "reward_column_is_text",
    "tools_without_parser",
    "tools_never_called",
    "retokenised_by_client",
    "system_prompt_changed",
    "judge_is_inconsistent",
    "one_reward_component",
    "sampler_mismatch",
}


@dataclass(frozen=True)
class Check:
    """A check for one fault.

    Attributes:
        name: its name in the record.
        stage: when it runs: at the start of a run, after a step's rollout, or after its update.
        severity: `error` if the fault prevents or distorts learning; `warning` if it makes results misleading.
        find: yields (what is wrong, how to fix it) from the evidence of its stage.
    """

    name: str
    stage: Stage
    severity: Severity
    find: Callable[[Any], Iterator[tuple[str, str]]]


@cache
def checks_of(stage: Stage) -> tuple[Check, ...]:
    """Import a stage's modules, and return its checks: the modules' public functions that return a `Result`.

    Only the stages of a run are imported: a dry run has no update.
    """
    modules = [import_module(f"astuner.diagnostics.{name}") for name in _MODULES[stage]]
    return tuple(
        Check(name, stage, "warning" if name in _WARNINGS else "error", function)
        for module in modules
        for name, function in vars(module).items()
        if isfunction(function) and not name.startswith("_") and function.__annotations__.get("return") == "Result"
    )


def all_checks() -> tuple[Check, ...]:
    """Return all checks."""
    return tuple(check for stage in get_args(Stage) for check in checks_of(stage))


class Monitor:
    """Runs the checks in each step of a run. Every finding is recorded; a new finding is also printed."""

    def __init__(self, start: StartEvidence, record: Callable[[RunFinding], None] = lambda _: None) -> None:
        """Create the monitor of a run with these inputs; `record` is called with every finding."""
        self._start = start
        self._record = record
        self._rollout: StepEvidence | None = None
        self._gaps: list[float] = []
        self._calls = self._stops = 0
        self._tools = (0, 0)
        # By check: the step in which it was printed last, and the number of its findings since.
        self._printed: dict[str, tuple[int, int]] = {}

    @staticmethod
    def of(
        config: AstunerConfig,
        tasks: TaskSet,
        codec: ChatCodec,
        model_path: str,
        record: Callable[[RunFinding], None],
        *,
        trains: bool,
    ) -> Monitor:
        """Return a run's monitor, from its inputs; the run trains, or tries out a training.

        The model's configuration files are read from `model_path`, a folder or a name.
        """
        template, model = probe_template(codec), model_facts(codec, model_path)
        return Monitor(StartEvidence(config, tasks, template, model, codec.decode, trains), record)

    def check_start(self) -> list[RunFinding]:
        """Run the checks of the inputs, and return their findings."""
        return self._run("start", self._start, 0)

    def check_rollout(self, step: int, episodes: Sequence[Episode]) -> list[RunFinding]:
        """Run the checks on a step's episodes, before its update, and return their findings."""
        before = self._rollout
        previous = (
            frozenset(e.task.task_id for e in before.episodes) if before is not None and before.step < step else None
        )
        evidence = StepEvidence(self._start, step, episodes, previous, self._calls, self._stops, self._tools)
        self._rollout = evidence
        self._calls += len(evidence.sampled_calls)
        self._stops += evidence.stops
        self._tools = evidence.tools
        return self._run("rollout", evidence, step)

    def check_update(
        self,
        metrics: Mapping[str, float],
        advantages: Mapping[str, float],
        samples: Mapping[str, Sequence[SampleUpdate]],
        dtype: str | None,
    ) -> list[RunFinding]:
        """Run the checks of an update and return their findings. `check_rollout` has checked the step's episodes.

        The arguments are as in `UpdateEvidence`.
        """
        assert self._rollout is not None
        evidence = UpdateEvidence(self._rollout, metrics, advantages, samples, tuple(self._gaps), dtype)
        found = self._run("update", evidence, self._rollout.step)
        if (gap := metrics.get("logprob_difference")) is not None:
            self._gaps.append(gap)
        return found

    def report(self, finding: RunFinding) -> None:
        """Record a finding, and print it if it is new or has not been printed for many steps."""
        self._record(finding)
        printed = self._printed.get(finding.check)
        if printed is not None and finding.step - printed[0] < _REPEAT_AFTER:
            self._printed[finding.check] = (printed[0], printed[1] + 1)
            return
        again = f" (found {printed[1]} times since step {printed[0]})" if printed and printed[1] else ""
        self._printed[finding.check] = (finding.step, 0)
        level = "ERROR" if finding.severity == "error" else "WARNING"
        where = f"step {finding.step}: " if finding.step else ""
        logger.log(level, "{}{}{}. To fix it: {} [{}]", where, finding.message, again, finding.fix, finding.check)

    def _run(self, stage: Stage, evidence: object, step: int) -> list[RunFinding]:
        found = [
            RunFinding(step, check.name, check.severity, message, fix)
            for check in checks_of(stage)
            for message, fix in check.find(evidence)
        ]
        for finding in found:
            self.report(finding)
        return found
