"""Episodes of a debug run or dry run: a table, and what a training step would use of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from astuner.backbone.base import RunContext
from astuner.errors import BackboneError
from astuner.schema import Episode, Split
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction import redact
from astuner.task_rollout import describe_failures
from astuner.task_rollout.statistics import scored, tokens_of
from astuner.viewer.transcripts import DEFAULT_SHOWN, Shown, print_transcripts


def episode_table(title: str, episodes: Sequence[Episode]) -> Table:
    """Return a table with one row per episode. A narrow terminal truncates the task's text, never a number."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task")
    for name in ("reward", "success", "calls", "tokens", "samples", "forks", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for episode in episodes:
        task = escape_control_characters(episode.task.main_query[:40]).replace("\n", "␊").replace("\t", "␉")
        table.add_row(
            Text(task, no_wrap=True, overflow="ellipsis"),
            "-" if episode.reward is None else f"{episode.reward:.2f}",
            "-" if episode.is_success is None else ("yes" if episode.is_success else "no"),
            str(len(episode.calls)),
            str(tokens_of([episode]).raw),
            str(len(episode.samples)),
            str(sum(call.fork is not None for call in episode.calls)),
            f"{episode.end_time - episode.start_time:.2f}",
        )
    return table


def describe_training_use(episodes: Sequence[Episode]) -> list[str]:
    """Return lines that describe what a training step would use of the episodes."""
    usable = [episode for episode in episodes if episode.status == "ok"]
    if not usable:
        failed = sum(episode.status == "failed" for episode in episodes)
        return [f"a training step would have nothing to train: {failed} of {len(episodes)} episodes failed"]
    groups: dict[str, set[float | None]] = {}
    for episode in usable:
        groups.setdefault(episode.task.task_id, set()).add(episode.reward)
    tokens, samples = tokens_of(usable), [sample for episode in usable for sample in episode.samples]
    with_signal = sum(len(rewards) > 1 for rewards in groups.values())
    return [
        f"a training step would use {len(usable)} of {len(episodes)} episodes: {len(samples)} samples with "
        f"{sum(len(sample.token_ids) for sample in samples)} tokens, {tokens.trained} of them trained",
        f"rewards differ within {with_signal} of {len(groups)} tasks; group-relative algorithms such as GRPO learn "
        "only from those",
    ]


def explain_no_training(episodes: Sequence[Episode]) -> str | None:
    """Return why no episode can be trained on; None if one can, or if none was dropped."""
    if any(episode.status == "ok" for episode in episodes):
        return None
    dropped = next((episode for episode in episodes if episode.status == "dropped"), None)
    if dropped is None:
        return None
    return f"none of the {len(episodes)} episodes can be trained on. The first: [{dropped.error_kind}] {dropped.error}"


def check_rewards(episodes: Sequence[Episode]) -> None:
    """Check that at least one episode has a reward.

    Raises:
        BackboneError: no episode has one; with the error of the first.
    """
    if not scored(episodes):
        reason = f". The first: [{episodes[0].error_kind}] {episodes[0].error}" if episodes else ""
        raise BackboneError(f"no episode has a reward ({len(episodes)} were run){reason}")


def print_episodes(
    context: RunContext, episodes: Sequence[Episode], title: str, split: Split, shown: Shown | None
) -> None:
    """Print the transcripts, the table and the failures for a debug run's episodes.

    Args:
        context: the run.
        episodes: its episodes.
        title: of the table.
        split: whether the tasks are of training or validation.
        shown: the transcripts that are printed; None for the default number.
    """
    console = context.progress.console
    print_transcripts(console, episodes, DEFAULT_SHOWN if shown is None else shown)
    console.print(episode_table(title, episodes))
    for line in describe_failures(episodes):
        console.print(escape(redact(f"failed: {line}")), style="yellow", soft_wrap=True)
    if split == "train":
        for line in describe_training_use(episodes):
            console.print(line, soft_wrap=True)
        if (reason := explain_no_training(episodes)) is not None:
            console.print(escape(redact(reason)), style="yellow", soft_wrap=True)
    folder = str(context.record.folder)
    console.print(escape(f"record: {folder} (to browse it: astuner view {shlex.quote(folder)})"), soft_wrap=True)
