"""`astuner explain`: selects episodes, and prints their explanation as text or JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from loguru import logger
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import track
from rich.table import Table

from astuner.analysis.explain.episode import EpisodeExplanation, ForkExplanation, explain_episode
from astuner.analysis.explain.run import CertificateSummary, RunExplanation, Totals, add_totals, explain_run
from astuner.errors import RecordError, counted, shorten
from astuner.launcher.console import facts_table, make_console, plain_table
from astuner.run_record.episode_file import read_recorded_episode
from astuner.run_record.episodes import NO_ADVANTAGE, read_index
from astuner.run_record.jsonable import to_jsonable
from astuner.run_record.recorded_run import find_episode, find_run
from astuner.schema import Split
from astuner.system.redaction.redactor import redact

_MAX_ROWS = 20
_MAX_FORKED_EPISODES = 5
_MAX_EXCERPT = 48
_TRACEBACK_LINES = 40
_MAX_ERROR = 2_000


def print_run(console: Console, run: RunExplanation) -> None:
    """Print how the calls of a run became training samples, as text."""
    kind = "training" if run.split == "train" else "validation"
    console.print(f"[bold]{escape(run.run)}[/], {kind} episodes of {counted(len(run.steps), 'step')}", soft_wrap=True)
    for finding in run.findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        steps = f"step {finding.first_step}" if finding.first_step else "start"
        if finding.last_step > finding.first_step:
            steps += f" to {finding.last_step}, {counted(finding.count, 'time')}"
        console.print()
        console.print(f"[{style}]{finding.severity}[/] {escape(finding.check)} ({steps})")
        console.print(f"  {escape(finding.message)}", soft_wrap=True)
        console.print(f"  to fix it: {escape(finding.fix)}", soft_wrap=True)
    console.print()
    total = run.total
    lines = facts_table()
    reward = "" if total.reward is None else f"; mean reward {total.reward:.3f}"
    lines.add_row("episodes", f"{total.ok:,} ok, {total.failed:,} failed, {total.dropped:,} dropped{reward}")
    if run.without_advantage:
        lines.add_row("", f"[yellow]{run.without_advantage:,} of them {NO_ADVANTAGE}[/]")
    dropped = f" ({total.dropped_samples:,} more dropped)" if total.dropped_samples else ""
    lines.add_row("calls", f"{counted(total.calls, 'call')} → {counted(total.samples, 'sample')}{dropped}")
    tokens = _tokens_text(total.tokens_raw, total.tokens_distinct, total.tokens_trained, total.saving)
    lines.add_row("tokens", tokens)
    lines.add_row("forks", _forks_text(total.forks) or "none")
    lines.add_row("certificate", _run_certificate(run.certificate))
    console.print(lines)
    if len(run.steps) > 1:
        console.print()
        console.print(_steps_table(run.steps))
    if run.forked:
        console.print()
        table = plain_table()
        table.add_column("episodes with most forks", overflow="fold")
        table.add_column("forks", overflow="fold")
        for episode in run.forked[:_MAX_FORKED_EPISODES]:
            table.add_row(escape(shorten(episode.episode_id)), escape(_forks_text(episode.forks)))
        console.print(table)
        episode_id = run.forked[0].episode_id
        name = episode_id if shorten(episode_id) == episode_id else "EPISODE"
        command = shlex.join(["astuner", "explain", run.run, name])
        console.print(escape(f"details of an episode: {command}"), soft_wrap=True)
    _print_fixes(console, run.fixes)


def print_episode(console: Console, episode: EpisodeExplanation) -> None:
    """Print how the calls of an episode became training samples, as text."""
    _print_head(console, episode)
    if episode.lacks_advantage:
        console.print(f"[yellow]{NO_ADVANTAGE}[/]", soft_wrap=True)
    if episode.calls:
        console.print()
        console.print(_calls_table(episode))
    for call in episode.calls:
        if call.fork is not None:
            fork = call.fork
            console.print()
            console.print(f"[bold]call {call.call}[/] forks from {_forked_call(fork)}: [yellow]{escape(fork.cause)}[/]")
            message = escape(f"messages[{fork.message_index}]")
            console.print(f"  it should extend that call, but differs from token {fork.position:,} on, in {message}")
            if fork.expected or fork.found:
                console.print(f"  expected  {escape(_excerpt(fork.expected))}", soft_wrap=True)
                console.print(f"  found     {escape(_excerpt(fork.found))}", soft_wrap=True)
    if episode.timelines:
        console.print()
        table = plain_table("timeline", "tokens", "trained", "weight")
        table.add_column("position of each call's completion")
        for timeline in episode.timelines:
            spans = [
                f"call {span.call or shorten(span.call_id)} at {span.start:,}–{span.end:,}" for span in timeline.calls
            ]
            table.add_row(
                str(timeline.timeline),
                f"{timeline.tokens:,}",
                f"{timeline.trained:,}",
                f"{timeline.weight:.2f}",
                escape(", ".join(spans)),
            )
        console.print(table)
    console.print()
    tokens = _tokens_text(episode.tokens_raw, episode.tokens_distinct, episode.tokens_trained, episode.saving)
    lines = facts_table()
    lines.add_row("tokens", tokens)
    lines.add_row("certificate", _episode_certificate(episode))
    console.print(lines)
    _print_fixes(console, episode.fixes)


def _run_certificate(summary: CertificateSummary | None) -> str:
    if summary is None:
        return "not requested"
    if summary.share is None:
        text = "nothing to check"
    else:
        style = "green" if summary.share == 1.0 else "red"
        checked = f"{counted(summary.calls, 'trained call')} of {counted(summary.episodes, 'trained episode')}"
        result = (
            "rebuilt exactly"
            if summary.share == 1.0
            else "checked; not rebuilt: " + ", ".join(map(shorten, summary.inexact))
        )
        # Rounded down: only if all calls are rebuilt it is 100%.
        text = f"[{style}]{math.floor(summary.share * 1000) / 10:g}%[/]: {escape(f'{checked} {result}')}"
    if summary.withheld:
        text += f"; {summary.withheld:,} not checked: their token ids are withheld, as they spell a secret"
    if summary.limited:
        text += f"; {summary.limited:,} not checked: they lost samples to max_sample_per_task"
    return text


def _episode_certificate(episode: EpisodeExplanation) -> str:
    if episode.certificate is None:
        return episode.certificate_note or ""
    style = "green" if episode.certificate == 1.0 else "yellow" if episode.certificate_note else "red"
    result = episode.certificate_note or (
        "the samples rebuild every trained call, token for token"
        if episode.certificate == 1.0
        else "the samples do not rebuild a call; please report this"
    )
    return f"[{style}]{episode.certificate:.2f}[/]: {result}"


def _steps_table(steps: Mapping[int, Totals]) -> Table:
    """Return a table with one row per step, or per range of steps for a long run."""
    table = plain_table(
        "step", "reward", "ok", "lost", "calls", "samples", "raw", "distinct", "trained", "saving", "forks"
    )
    numbers = list(steps)
    size = math.ceil(len(numbers) / _MAX_ROWS)
    for first in range(0, len(numbers), size):
        part = numbers[first : first + size]
        totals = add_totals([steps[number] for number in part])
        table.add_row(
            str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}",
            "–" if totals.reward is None else f"{totals.reward:.2f}",
            f"{totals.ok:,}",
            f"{totals.failed + totals.dropped:,}",
            _short(totals.calls),
            _short(totals.samples),
            _short(totals.tokens_raw),
            "–" if totals.tokens_distinct is None else _short(totals.tokens_distinct),
            _short(totals.tokens_trained),
            "–" if totals.saving is None else f"{totals.saving:.1f}×",
            f"{sum(totals.forks.values()):,}",
        )
    return table


def _print_head(console: Console, episode: EpisodeExplanation) -> None:
    style = {"ok": "green", "failed": "red"}.get(episode.status, "yellow")
    facts = [f"[{style}]{episode.status}[/]"]
    if episode.reward is not None:
        rewards = ", ".join(f"{shorten(agent)} {reward:g}" for agent, reward in episode.agent_rewards.items())
        facts.append(f"reward {episode.reward:g}" + (f" (the mean of {escape(rewards)})" if rewards else ""))
    if episode.is_success is not None:
        facts.append("success" if episode.is_success else "no success")
    if episode.advantage is not None:
        differs = bool(episode.agent_rewards) or any(call.reward is not None for call in episode.calls)
        facts.append(f"advantage {episode.advantage:+.2f}" + (" (of the mean; calls differ)" if differs else ""))
    facts.append(f"{episode.seconds:.1f} s")
    console.print(f"[bold]{escape(shorten(episode.episode_id))}[/]", soft_wrap=True)
    console.print(" · ".join(facts))
    console.print(
        escape(f"task {shorten(episode.task_id)}, repeat {episode.repeat_index}, {episode.split} step {episode.step}"),
        soft_wrap=True,
    )
    if episode.judgement is not None:
        for name, values in (
            ("components of the reward", episode.judgement.components),
            ("metrics of the judge", episode.judgement.metrics),
        ):
            if values:
                parts = ", ".join(f"{shorten(key)} {value:g}" for key, value in values.items())
                console.print(escape(f"{name}: {parts}"), soft_wrap=True)
        if explanation := episode.judgement.explanation:
            console.print(escape(f"judge: {shorten(explanation, _MAX_ERROR)}"), soft_wrap=True)
    if episode.error_kind or episode.error:
        console.print(escape(f"[{episode.error_kind}] {shorten(episode.error or '', _MAX_ERROR)}"), style=style)
    if episode.error_traceback:
        lines = episode.error_traceback.rstrip().splitlines()
        if len(lines) > _TRACEBACK_LINES:
            console.print(f"the last {_TRACEBACK_LINES} of {len(lines)} lines of the traceback; --json has all")
        last = [shorten(line, _MAX_ERROR) for line in lines[-_TRACEBACK_LINES:]]
        console.print(escape("\n".join(last)), soft_wrap=True, highlight=False)
    if episode.anomaly is not None:
        console.print(escape(f"degenerate output in {episode.anomaly}"), style="yellow", soft_wrap=True)
    if episode.process_effects:
        effects = "; ".join(episode.process_effects)
        console.print(escape(f"changed settings of the process, which were restored: {effects}"), style="yellow")
    if episode.ended_processes:
        left = "; ".join(episode.ended_processes)
        console.print(escape(f"left processes running, which astuner ended: {left}"), style="yellow")
    if episode.withheld:
        console.print("its texts held a secret, so the record has no token ids and samples of it", style="yellow")


def _calls_table(episode: EpisodeExplanation) -> Table:
    calls = episode.calls
    with_agents = any(call.agent_name for call in calls)
    with_targets = len({call.target_tag for call in calls}) > 1 or calls[0].target_tag != "default"
    with_rewards = any(call.reward is not None for call in calls)
    with_advantages = any(call.advantage not in (None, episode.advantage) for call in calls)
    table = plain_table("call")
    if with_agents:
        table.add_column("agent", overflow="fold")
    if with_targets:
        table.add_column("target", overflow="fold")
    if with_rewards:
        table.add_column("reward", justify="right", no_wrap=True)
    if with_advantages:
        table.add_column("advantage", justify="right", no_wrap=True)
    for name in ("prompt", "answer", "ended", "version", "seconds"):
        table.add_column(name, justify="left" if name == "ended" else "right", no_wrap=True)
    table.add_column("extends")
    for call in calls:
        if call.fork is not None:
            extends = f"[yellow]fork[/] of {_forked_call(call.fork)}"
        elif call.extends is not None:
            extends = f"call {call.extends}"
        else:
            extends = "unknown" if call.shared_tokens is None else "–"
        table.add_row(
            str(call.call),
            *([escape(shorten(call.agent_name))] if with_agents else []),
            *([escape(shorten(call.target_tag))] if with_targets else []),
            *(["–" if call.reward is None else f"{call.reward:g}"] if with_rewards else []),
            *(["–" if call.advantage is None else f"{call.advantage:+.2f}"] if with_advantages else []),
            "–" if call.prompt_tokens is None else f"{call.prompt_tokens:,}",
            "–" if call.completion_tokens is None else f"{call.completion_tokens:,}",
            call.finish_reason if call.trained else "not trained",
            str(call.policy_version),
            f"{call.seconds:.2f}",
            extends,
        )
    return table


def _forked_call(fork: ForkExplanation) -> str:
    return f"call {fork.call}" if fork.call is not None else f"call {escape(shorten(fork.call_id))}"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}…")


def _print_fixes(console: Console, fixes: Mapping[str, str]) -> None:
    if not fixes:
        return
    console.print()
    console.print("[bold]what to try[/]")
    for cause, fix in fixes.items():
        console.print(f"  [yellow]{escape(cause)}[/]")
        console.print(Padding(escape(fix), (0, 0, 0, 4)))


def _tokens_text(raw: int, distinct: int | None, trained: int, saving: float | None) -> str:
    if distinct is None or saving is None:
        return f"{raw:,} raw → {trained:,} trained"
    return f"{raw:,} raw → {distinct:,} distinct → {trained:,} trained, saving {saving:.1f}×"


def _forks_text(forks: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {cause}" for cause, count in forks.items())


def _short(count: int) -> str:
    """Return a number in at most 6 characters, so that a row fits 80 columns."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1000:,.0f}k" if count < 10_000_000 else f"{count / 1_000_000:,.0f}M"


def explain(
    run: str,
    episode: str | None,
    exp_dir: Path,
    *,
    step: int | None = None,
    split: Split | None = None,
    certify: bool = True,
    as_json: bool = False,
) -> None:
    """Print an explanation for a run, or for one of its episodes, on stdout; arguments as for `astuner explain`.

    Raises:
        RecordError: If there is no such run, episode or step, or the record cannot be read.
    """
    folder = find_run(run, exp_dir)
    entries = read_index(folder, lambda error: logger.warning("skipped: {}", error))
    explanation: RunExplanation | EpisodeExplanation
    if episode is not None:
        entry = find_episode(episode, entries)
        explanation = explain_episode(str(folder), entry, read_recorded_episode(folder / entry.path))
    else:
        if not entries:
            raise RecordError(f"the run in {folder} has no episodes (supervised training runs none)")
        if split is None:
            split = "train" if any(entry.split == "train" for entry in entries) else "val"
        of_split = [entry for entry in entries if entry.split == split]
        if not of_split:
            raise RecordError(f"the run in {folder} has no episodes of split {split!r}; omit --split")
        selected = [entry for entry in of_split if step is None or entry.step == step]
        if not selected:
            steps = sorted({entry.step for entry in of_split})
            existing = f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
            if len(steps) <= 10:
                existing = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
            raise RecordError(f"the run in {folder} has no {split} episodes of step {step}: it has {existing}")
        progress = make_console()
        is_hidden = not (certify and progress.is_terminal)
        tracked = track(selected, "reading episodes", console=progress, transient=True, disable=is_hidden)
        explanation = explain_run(folder, split, tracked, certify=certify)
    console = make_console(stderr=False)
    if as_json:
        # ASCII only, so that any terminal can print any text of a record.
        text = json.dumps(to_jsonable(asdict(explanation), redact), indent=2)
        console.print(text, markup=False, soft_wrap=True)
    elif isinstance(explanation, RunExplanation):
        print_run(console, explanation)
    else:
        print_episode(console, explanation)
