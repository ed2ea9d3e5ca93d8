"""`diagnostics.jsonl`: the findings from the checks in `astuner.diagnostics`, one line each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from astuner.errors import RecordError, short_repr
from astuner.run_record.files import JsonLines, OnDamaged, read_json_lines
from astuner.system.redaction import redact

FINDINGS_FILE = "diagnostics.jsonl"
Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A fault that a check has found.

    Attributes:
        step: The training step; 0 is the start of the run.
        check: Name of the check.
        severity: `error` if the fault prevents or distorts learning, else `warning`.
        message: What is wrong, with the evidence.
        fix: What to change.
    """

    step: int
    check: str
    severity: Severity
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class FindingSummary:
    """The findings of one check in a run.

    Attributes:
        check, severity: As in `RunFinding`.
        first_step, last_step: The first and the last step with a finding.
        count: The number of findings.
        message, fix: Those of the last finding.
    """

    check: str
    severity: Severity
    first_step: int
    last_step: int
    count: int
    message: str
    fix: str


class FindingsFile:
    """Writer of `diagnostics.jsonl`. The file is created by the first finding."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FINDINGS_FILE
        self._lines: JsonLines | None = JsonLines(self._path) if self._path.exists() else None

    def write(self, finding: RunFinding) -> None:
        """Append a finding, without secrets.

        Raises:
            RecordError: If it cannot be written.
        """
        if self._lines is None:
            self._lines = JsonLines(self._path)
        texts = {"message": redact(finding.message), "fix": redact(finding.fix)}
        self._lines.append(asdict(finding) | texts)

    def truncate_after(self, step: int) -> int:
        """Remove the findings for steps after `step` and repeated findings, and return the number of removed lines.

        Raises:
            RecordError: If the file cannot be written.
        """

        def identify(row: Mapping[str, Any]) -> Hashable | None:
            finding = _parse(row)
            return (finding.step, finding.check, finding.message) if finding.step <= step else None

        return 0 if self._lines is None else self._lines.retain_rows(identify)[0]

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()


def read_findings(folder: Path, on_damaged: OnDamaged | None = None) -> list[RunFinding]:
    """Return the findings for the run in `folder`, in writing order; none if there is no file.

    Args:
        folder: The run's folder.
        on_damaged: Called for lines that cannot be read, which are skipped. If None, such a line is an error.

    Raises:
        RecordError: If the file cannot be read.
    """
    path = folder / FINDINGS_FILE
    if not path.exists():
        return []
    findings = []
    for number, row in read_json_lines(path, on_damaged):
        try:
            findings.append(_parse(row))
        except RecordError as error:
            damaged = RecordError(f"{path}, line {number}: {error}")
            if on_damaged is None:
                raise damaged from error
            on_damaged(damaged)
    return findings


def _parse(row: Mapping[str, Any]) -> RunFinding:
    try:
        severity: Severity = "error" if row["severity"] == "error" else "warning"
        return RunFinding(int(row["step"]), str(row["check"]), severity, str(row["message"]), str(row["fix"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(
            f"expected a finding with step, check, severity, message and fix ({short_repr(error)})"
        ) from error


def summarise_findings(findings: Sequence[RunFinding]) -> list[FindingSummary]:
    """Return one summary per check: errors first, then by the number of findings."""
    by_check: dict[str, list[RunFinding]] = {}
    for finding in findings:
        by_check.setdefault(finding.check, []).append(finding)
    summaries = [
        FindingSummary(
            check=check,
            severity="error" if any(finding.severity == "error" for finding in found) else "warning",
            first_step=min(finding.step for finding in found),
            last_step=max(finding.step for finding in found),
            count=len(found),
            message=found[-1].message,
            fix=found[-1].fix,
        )
        for check, found in by_check.items()
    ]
    return sorted(summaries, key=lambda summary: (summary.severity != "error", -summary.count, summary.check))
