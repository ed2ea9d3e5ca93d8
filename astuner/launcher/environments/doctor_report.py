"""Printing what the doctor found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from astuner.launcher.environments.doctor import Report

_STYLES = {"ready": "green", "not installed": "dim", "broken": "bold red"}


def print_reports(console: Console, reports: Sequence[Report], *, as_json: bool) -> None:
    """Print them, for people or as one JSON object by backbone."""
    if as_json:
        by_name = {report.backbone: asdict(report) for report in reports}
        console.print(json.dumps(by_name, indent=1), markup=False, soft_wrap=True)
        return
    for report in reports:
        _print(console, report)


def _print(console: Console, report: Report) -> None:
    style = _STYLES[report.state]
    where = f"  {report.place}, Python {report.python}" if report.python else f"  {report.place or ''}"
    console.print(f"{report.backbone:<8} [{style}]{report.state}[/]{escape(where)}".rstrip(), soft_wrap=True)
    if report.versions:
        line = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        console.print(f"         {escape(line)}", style="dim", soft_wrap=True)
    for finding in report.findings:
        console.print(
            f"         {escape(finding.problem)}", style="red" if finding.broken else "yellow", soft_wrap=True
        )
        console.print(f"         → {escape(finding.mend)}", soft_wrap=True)


def exit_code(reports: Sequence[Report]) -> int:
    """1 if something that is installed is broken, 0 otherwise."""
    return int(any(report.state == "broken" for report in reports))
