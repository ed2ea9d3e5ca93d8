"""Episodes that were rolled out for a look: as a table, and what a training step would have had of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from astuner.errors import BackboneError
from astuner.launcher.visible import visible_line
from astuner.schema import Episode
from astuner.task_rollout.statistics import scored, tokens_of

_SHOWN_FAILURES = 3


def episode_table(title: str, episodes: Sequence[Episode]) -> Table:
    """Return a row an episode; where there is not room for all, the task's text is cut, and no number."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task")
    for name in ("reward", "success", "calls", "tokens", "samples", "forks", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for episode in episodes:
        table.add_row(
            Text(visible_line(episode.task.main_query[:40]), no_wrap=True, overflow="ellipsis"),
            "-" if episode.reward is None else f"{episode.reward:.2f}",
            "-" if episode.is_success is None else ("yes" if episode.is_success else "no"),
            str(len(episode.calls)),
            str(tokens_of([episode]).raw),
            str(len(episode.samples)),
            str(sum(call.fork is not None for call in episode.calls)),
            f"{episode.end_time - episode.start_time:.2f}",
        )
    return table


def training_lines(episodes: Sequence[Episode]) -> list[str]:
    """Return what a training step would have used of these episodes."""
    usable = [episode for episode in episodes if episode.status == "ok"]
    groups: dict[str, set[float | None]] = {}
    for episode in usable:
        groups.setdefault(episode.task.task_id, set()).add(episode.reward)
    tokens, samples = tokens_of(usable), [sample for episode in usable for sample in episode.samples]
    differ = sum(len(rewards) > 1 for rewards in groups.values())
    return [
        f"a training step would have used {len(usable)} of {len(episodes)} episodes: {len(samples)} samples of "
        f"{sum(len(sample.token_ids) for sample in samples)} tokens, {tokens.trained} of them trained",
        f"the rewards of {differ} of {len(groups)} tasks differ, which is what comparing algorithms learn from",
    ]


def why_nothing_trains(episodes: Sequence[Episode]) -> str | None:
    """Say why none of the episodes can be trained on; None where one can."""
    if any(episode.status == "ok" for episode in episodes):
        return None
    lost = next((episode for episode in episodes if episode.status == "dropped"), None)
    if lost is None:
        return None
    return f"none of {len(episodes)} episodes can be trained on. The first: [{lost.error_kind}] {lost.error}"


def failure_lines(episodes: Sequence[Episode]) -> list[str]:
    """Return why the first few failed episodes failed."""
    failed = [episode for episode in episodes if episode.status != "ok"]
    return [f"{episode.episode_id} {episode.status}: [{episode.error_kind}] {episode.error}" for episode in failed][
        :_SHOWN_FAILURES
    ]


def refuse_unrewarded(episodes: Sequence[Episode]) -> None:
    """Refuse episodes none of which has a reward.

    Raises:
        BackboneError: with the first one's reason.
    """
    if not scored(episodes):
        why = f". The first: [{episodes[0].error_kind}] {episodes[0].error}" if episodes else ""
        raise BackboneError(f"no episode got a reward ({len(episodes)} were run){why}")
