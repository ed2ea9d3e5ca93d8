"""The command: judges the episodes of a run, writes the comparison, and prints it."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from loguru import logger
from rich.progress import Progress

from astuner.algorithms import resolve
from astuner.analysis.rescore.audit import RewardPair, audit_rewards
from astuner.analysis.rescore.comparison import compare, reward_correlation, with_held_out
from astuner.analysis.rescore.judging import JudgedEpisode, has_output, judge_episodes
from astuner.analysis.rescore.text import print_rescore
from astuner.config.data import TaskJudgeConfig
from astuner.config.problems import raise_problems
from astuner.config.root import AstunerConfig
from astuner.config.validation import validate
from astuner.errors import JudgeError, RecordError
from astuner.launcher.console import make_console
from astuner.run_record.episodes import EpisodeEntry, read_index
from astuner.run_record.lookup import find_run
from astuner.run_record.rescores import Rescore, RescoredEpisode, RewardAudit, create_rescore_folder, write_rescore
from astuner.schema import Split
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.loading import make_judge

_RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class RescoreOptions:
    """The options of `astuner rescore`.

    Attributes:
        judges: The new judge, and a held-out judge for the audit, as `package.module->Class`.
        params, held_out_params: Their parameters.
        audit: Whether to audit the rewards. With one judge, it is the held-out judge of the recorded rewards.
        step: Only judge the episodes of this step.
        split: Only judge the episodes of this split; by default `train` if there are training episodes, else `val`.
        timeout: Time limit of a judge for an episode, in seconds; None for `task_judge.timeout` of the run.
        jobs: Number of episodes that are judged at the same time.
        output: Folder of the result; by default a new one beside the run's folder.
        as_json: Print one JSON object.
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

    Args:
        run: The run's folder, or its name under `exp_dir`.
        exp_dir: Folder of the runs.
        options: The judges and the selection of the episodes.

    Returns:
        The folder of the result.

    Raises:
        RecordError: If there is no such run or episode, or the record cannot be read, or the result not be written.
        PluginError: If a judge cannot be loaded.
        JudgeError: If the judge scores no episode.
    """
    folder = find_run(run, exp_dir)
    config = _recorded_config(folder)
    algorithm = resolve(config.trainer_common.algorithm)
    judges = _judges(config.task_judge, options)
    selected = _select(folder, options.step, options.split)
    if algorithm.rule is None:
        raise RecordError(f"the run in {folder} is supervised training, which has no rewards")
    entries = [entry for entry in selected if has_output(entry)]
    if not entries:
        raise RecordError(f"the workflows of all {len(selected)} episodes failed, so there is nothing to judge")
    timeout = options.timeout or config.task_judge.timeout
    judged, seconds = _judge(folder, entries, judges[0], timeout, options.jobs, _keeps_tokens(config))
    steps, rows = compare(config, algorithm, judged)
    asked = [row for row, each in zip(rows, judged, strict=True) if each.was_asked]
    unscored = [row for row in asked if row.reward is None]
    if asked and len(unscored) == len(asked):
        raise JudgeError(f"{options.judges[0]} scored none of {len(asked)} episodes: {unscored[0].error}")
    if len(judges) > 1:
        rows = with_held_out(rows, _judge(folder, entries, judges[1], timeout, options.jobs)[0])
    result = Rescore(
        run=str(folder.absolute()),
        judge=options.judges[0],
        params=_params(config.task_judge, options.judges[0], options.params),
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
        audit=_audit([row for row, each in zip(rows, judged, strict=True) if each.was_asked], options)
        if options.audit or len(judges) > 1
        else None,
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


def _judges(config: TaskJudgeConfig, options: RescoreOptions) -> list[BaseJudge]:
    params = (options.params, options.held_out_params)
    return [
        make_judge(path, config, _params(config, path, given), (Path.cwd(),), setting="--judge")
        for path, given in zip(options.judges, params, strict=False)
    ]


def _params(config: TaskJudgeConfig, path: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a judge. The run's own judge keeps its parameters, unless they are given."""
    return {**(config.params if path == config.judge_protocol else {}), **given}


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


def _keeps_tokens(config: AstunerConfig) -> bool:
    """Return whether the advantages depend on the lengths of the answers."""
    return config.trainer_common.algorithm.overlong_buffer_length > 0


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
