"""Episodes of a debug run or dry run: a table, and what a training step would use of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from astuner.errors import BackboneError
from astuner.launcher.console import escape_control_characters
from astuner.schema import Episode
from astuner.task_rollout.statistics import scored, tokens_of


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
