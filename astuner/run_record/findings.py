"""`diagnostics.jsonl`: the findings from the checks in `astuner.diagnostics`, one line each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from astuner.errors import RecordError, short_repr
from astuner.run_record.files import JsonLines, OnDamaged, read_rows
from astuner.system.redaction.redactor import redact

FINDINGS_FILE = "diagnostics.jsonl"
Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A fault that a check has found at a training step; step 0 is the start of the run.

    The severity is `error` if the fault prevents or distorts learning. The message has the evidence.
    """

    step: int
    check: str
    severity: Severity
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class FindingSummary:
    """One check's findings in a run: their number, and the last one's `message` and `fix`."""

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
        """Append a finding, without secrets; `RecordError` if that fails."""
        if self._lines is None:
            self._lines = JsonLines(self._path)
        texts = {"message": redact(finding.message), "fix": redact(finding.fix)}
        self._lines.append(asdict(finding) | texts)

    def truncate_after(self, step: int) -> int:
        """Remove findings for steps after `step` and repeated findings, and return how many lines were removed."""

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

    Arguments and errors are as for `read_metrics`.
    """
    path = folder / FINDINGS_FILE
    return read_rows(path, _parse, on_damaged) if path.exists() else []


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
