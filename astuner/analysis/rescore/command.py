"""`astuner rescore`: judges a run's episodes, writes the comparison, and prints it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from loguru import logger
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from astuner.algorithms.registry import resolve
from astuner.analysis.rescore.comparison import (
    RewardPair,
    audit_rewards,
    compare,
    mean,
    reward_correlation,
)
from astuner.analysis.rescore.judging import JudgedEpisode, has_output, judge_episodes
from astuner.config.data import TaskJudgeConfig
from astuner.config.root import AstunerConfig
from astuner.config.validation import raise_problems, validate
from astuner.errors import JudgeError, RecordError, shorten
from astuner.launcher.console import facts_table, make_console, plain_table
from astuner.run_record.episodes import EpisodeEntry, read_index
from astuner.run_record.recorded_run import find_run
from astuner.run_record.rescores import (
    Rescore,
    RescoredEpisode,
    RewardAudit,
    create_rescore_folder,
    write_rescore,
)
from astuner.schema import Split
from astuner.task_judge.judge_base import BaseJudge, make_judge

_RECORDED = "recorded"
_MAX_ROWS = 20
_MAX_EPISODES = 10


@dataclass(frozen=True, slots=True)
class RescoreOptions:
    """The options of `astuner rescore`, as in its help.

    Attributes:
        judges: The new judge, and a held-out judge for the audit, as `package.module->Class`.
        timeout: Seconds that a judge may take for an episode; None for `task_judge.timeout` of the run.
    """

    judges: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    held_out_params: Mapping[str, Any] = field(default_factory=dict)
    audit: bool = False
    step: int | None = None
    split: Split | None = None
    timeout: float | None = None
    jobs: int = 64
    output: Path | None = None
    as_json: bool = False


def rescore(run: str, exp_dir: Path, options: RescoreOptions) -> Path:
    """Score a run's episodes with another judge, write the comparison of the rewards, and print it on stdout.

    The run is a folder, or a name under `exp_dir`. The result's folder is returned.

    Raises:
        RecordError: If there is no such run or episode, or the record cannot be read, or the result not be written.
        PluginError: If a judge cannot be loaded.
        JudgeError: If the judge scores no episode.
    """
    folder = find_run(run, exp_dir)
    config = _recorded_config(folder)
    algorithm = resolve(config.trainer_common.algorithm)
    params = _params(config.task_judge, options)
    given = zip(options.judges, params, strict=True)
    judges = [make_judge(path, config.task_judge, each, (Path.cwd(),), setting="--judge") for path, each in given]
    selected = _select(folder, options.step, options.split)
    if algorithm.rule is None:
        raise RecordError(f"the run in {folder} is supervised training, which has no rewards")
    entries = [entry for entry in selected if has_output(entry)]
    if not entries:
        raise RecordError(f"the workflows of all {len(selected)} episodes failed, so there is nothing to judge")
    timeout = options.timeout or config.task_judge.timeout
    # Punishments of long answers need the tokens.
    keep_tokens = config.trainer_common.algorithm.overlong_buffer_length > 0
    judged, seconds = _judge(folder, entries, judges[0], timeout, options.jobs, keep_tokens)
    steps, rows = compare(config, algorithm, judged)
    asked = [row for row, each in zip(rows, judged, strict=True) if each.was_asked]
    unscored = [row for row in asked if row.reward is None]
    if asked and len(unscored) == len(asked):
        raise JudgeError(f"{options.judges[0]} scored none of {len(asked)} episodes: {unscored[0].error}")
    if len(judges) > 1:
        held_out, _ = _judge(folder, entries, judges[1], timeout, options.jobs)
        rewards = {each.entry.path: each.after.reward for each in held_out}
        rows = [replace(row, held_out_reward=rewards.get(row.path)) for row in rows]
        asked = [row for row, each in zip(rows, judged, strict=True) if each.was_asked]
    result = Rescore(
        run=str(folder.absolute()),
        judge=options.judges[0],
        params=params[0],
        algorithm=algorithm.name,
        episodes=len(asked),
        changed=sum(row.is_changed for row in rows),
        sign_flips=sum(row.flips_sign for row in rows),
        unscored=len(unscored),
        skipped=len(selected) - len(entries),
        kept=len(rows) - len(asked),
        kendall_tau=reward_correlation([(row.reward_before, row.reward) for row in rows]),
        episodes_per_second=len(entries) / seconds,
        steps=tuple(steps),
        errors=dict(Counter(str(row.error_kind) for row in unscored).most_common()),
        first_error=unscored[0].error if unscored else None,
        audit=_audit(asked, options) if options.audit or len(judges) > 1 else None,
    )
    output = create_rescore_folder(folder, options.judges[0], options.output)
    write_rescore(output, result, rows)
    _show(result, output, as_json=options.as_json)
    return output


def _recorded_config(folder: Path) -> AstunerConfig:
    path = folder / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        logger.warning("{} cannot be read: {}", path, error)
        tree = None
    if not tree:
        logger.warning("{} has no configuration; the advantages are those of the default algorithm", folder)
        return AstunerConfig()
    # The values were checked when the run started. Checks of the model, the data and the machine do not apply.
    config, problems = validate(tree, {})
    raise_problems(problems)
    return config.astuner


def _params(config: TaskJudgeConfig, options: RescoreOptions) -> list[Mapping[str, Any]]:
    """Return each judge's parameters. The run's own judge keeps its parameters, unless they are given."""
    return [
        {**(config.params if path == config.judge_protocol else {}), **given}
        for path, given in zip(options.judges, (options.params, options.held_out_params), strict=False)
    ]


def _select(folder: Path, step: int | None, split: Split | None) -> list[EpisodeEntry]:
    entries = read_index(folder, lambda error: logger.warning("skipped: {}", error))
    if not entries:
        raise RecordError(f"the run in {folder} has no episodes (supervised training runs none)")
    split = split or ("train" if any(entry.split == "train" for entry in entries) else "val")
    selected = [entry for entry in entries if entry.split == split and step in (None, entry.step)]
    if not selected:
        at = "" if step is None else f" of step {step}"
        raise RecordError(f"the run in {folder} has no {split} episodes{at}; change --split or --step")
    return selected


def _judge(
    folder: Path,
    entries: Sequence[EpisodeEntry],
    judge: BaseJudge,
    timeout: float,
    jobs: int,
    keep_tokens: bool = False,
) -> tuple[list[JudgedEpisode], float]:
    """Return the judged episodes, and the seconds that reading and judging took."""
    console = make_console()
    with (
        contextlib.closing(judge),
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("judging episodes", total=len(entries))
        started = time.monotonic()
        judged = judge_episodes(
            folder,
            entries,
            judge,
            timeout=timeout,
            jobs=jobs,
            on_judged=lambda count: progress.advance(task, count),
            keep_tokens=keep_tokens,
        )
        seconds = max(time.monotonic() - started, 1e-9)
    return judged, seconds


def _audit(rows: Sequence[RescoredEpisode], options: RescoreOptions) -> RewardAudit:
    two = len(options.judges) > 1
    names = (options.judges[0], options.judges[1]) if two else (_RECORDED, options.judges[0])
    values = [(row, row.reward, row.held_out_reward) if two else (row, row.reward_before, row.reward) for row in rows]
    pairs = [
        RewardPair(row.episode_id, row.step, reward, held_out)
        for row, reward, held_out in values
        if reward is not None and held_out is not None
    ]
    return audit_rewards(*names, pairs)


def _show(result: Rescore, output: Path, *, as_json: bool) -> None:
    console = make_console(stderr=False)
    if as_json:
        names = ("episodes", "changed", "sign_flips", "kendall_tau", "episodes_per_second")
        values: dict[str, Any] = {name: getattr(result, name) for name in names}
        if result.audit is not None:
            values["audit"] = asdict(result.audit)
        console.print(json.dumps(values), markup=False, soft_wrap=True)
    else:
        print_rescore(console, result, output)


def print_rescore(console: Console, rescore: Rescore, folder: Path) -> None:
    """Print the comparison between a run's rewards and another judge's."""
    console.print(f"[bold]{escape(rescore.run)}[/], judged by {escape(rescore.judge)}", soft_wrap=True)
    console.print()
    facts = facts_table()
    facts.add_row("episodes", f"{rescore.episodes:,} judged, {rescore.episodes_per_second:,.0f} per second")
    if rescore.skipped:
        facts.add_row("", f"{rescore.skipped:,} not judged: their workflow failed")
    if rescore.kept:
        facts.add_row("", f"{rescore.kept:,} not judged: they have the reward for degenerate output")
    if rescore.unscored:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in rescore.errors.items())
        facts.add_row("unscored", escape(f"{rescore.unscored:,} ({kinds}): {shorten(rescore.first_error or '', 300)}"))
    facts.add_row("rewards", f"{rescore.changed:,} changed; Kendall's tau {_number(rescore.kendall_tau)}")
    facts.add_row("advantages", f"{rescore.sign_flips:,} with the other sign ({rescore.algorithm})")
    facts.add_row(
        "gradients", f"{rescore.steps_with_other_gradient:,} of {len(rescore.steps):,} steps would have differed"
    )
    console.print(facts)
    console.print()
    # One row per step, or per range of steps for a long run.
    table = plain_table("step", "episodes", "reward", "new", "changed", "flips", "tau", "similarity", "gradient")
    size = math.ceil(len(rescore.steps) / _MAX_ROWS)
    for first in range(0, len(rescore.steps), size):
        part = rescore.steps[first : first + size]
        differing = sum(step.gradient_differs for step in part)
        table.add_row(
            str(part[0].step) if len(part) == 1 else f"{part[0].step}–{part[-1].step}",
            f"{sum(step.episodes for step in part):,}",
            _number(mean([step.reward_before for step in part])),
            _number(mean([step.reward for step in part])),
            f"{sum(step.changed for step in part):,}",
            f"{sum(step.sign_flips for step in part):,}",
            _number(mean([step.kendall_tau for step in part])),
            _number(mean([step.similarity for step in part])),
            ("differs" if differing else "same") if len(part) == 1 else f"{differing} differ",
        )
    console.print(table)
    if rescore.audit is not None:
        _print_audit(console, rescore.audit)
    console.print()
    console.print(f"written to {escape(str(folder))}; astuner view shows it", soft_wrap=True)


def _print_audit(console: Console, audit: RewardAudit) -> None:
    console.print()
    verdict = "[bold red]diverges[/]" if audit.diverges else "does not diverge"
    console.print(
        f"[bold]audit[/]  the reward of {escape(audit.judge)} {verdict} from that of {escape(audit.held_out)}",
        soft_wrap=True,
    )
    trends = f"trend {_number(audit.trend)} and {_number(audit.held_out_trend)}"
    console.print(
        f"  {audit.episodes:,} episodes, Kendall's tau {_number(audit.kendall_tau)}, {trends}", soft_wrap=True
    )
    for step in audit.diverging_steps[:_MAX_EPISODES]:
        console.print(
            f"  step {step.step}: reward {step.reward_before:.3f} → {step.reward:.3f}, held-out "
            f"{step.held_out_before:.3f} → {step.held_out:.3f}"
        )
    if audit.disagreements:
        table = plain_table("step", "reward", "held-out")
        table.add_column("episodes with most disagreement", overflow="fold")
        for row in audit.disagreements[:_MAX_EPISODES]:
            table.add_row(
                str(row.step), f"{row.reward:.3f}", f"{row.held_out_reward:.3f}", escape(shorten(row.episode_id))
            )
        console.print()
        console.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
