"""Runs the checks of a run, and reports their findings on the console and in the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loguru import logger

from astuner.config.root import AstunerConfig
from astuner.diagnostics.evidence import (
    StartEvidence,
    StepEvidence,
    UpdateEvidence,
    model_facts,
    probe_template,
)
from astuner.diagnostics.registry import Stage, checks_of
from astuner.model_tuner import ChatCodec
from astuner.run_record.findings import RunFinding
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, TaskSet

# The console repeats a finding that persists after this number of steps.
_REPEAT_AFTER = 20


class Monitor:
    """Runs the checks in each step of a run. Every finding is recorded; a new finding is also printed."""

    def __init__(self, start: StartEvidence, record: Callable[[RunFinding], None] = lambda _: None) -> None:
        """Create the monitor of a run.

        Args:
            start: the inputs of the run.
            record: called with every finding.
        """
        self._start = start
        self._record = record
        self._rollout: StepEvidence | None = None
        self._gaps: list[float] = []
        self._calls = self._stops = 0
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
        """Return the monitor of a run, from its inputs.

        Args:
            config: the configuration.
            tasks: the tasks.
            codec: renders messages.
            model_path: folder or name of the model, whose configuration files are read.
            record: called with every finding.
            trains: whether the run trains, or is a dry run of training.
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
        evidence = StepEvidence(self._start, step, episodes, previous, self._calls, self._stops)
        self._rollout = evidence
        self._calls += len(evidence.sampled_calls)
        self._stops += evidence.stops
        return self._run("rollout", evidence, step)

    def check_update(
        self,
        metrics: Mapping[str, float],
        advantages: Mapping[str, float],
        samples: Mapping[str, Sequence[SampleUpdate]],
        dtype: str | None,
    ) -> list[RunFinding]:
        """Run the checks of an update and return their findings. `check_rollout` has checked the step's episodes.

        Args:
            metrics: metrics of the update, by name.
            advantages: advantage by episode id.
            samples: by episode id, the advantages and logprobs with which each sample was trained.
            dtype: the dtype that the model computes in; None if unknown.
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
        found = []
        for check in checks_of(stage):
            for message, fix in check.find(evidence):
                found.append(RunFinding(step, check.name, check.severity, message, fix))
        for finding in found:
            self.report(finding)
        return found
