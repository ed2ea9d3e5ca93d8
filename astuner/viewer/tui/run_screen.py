"""A run: its verdict, its metrics, and the kinds of its episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from astuner.run_record.console_lines import spark_line
from astuner.run_record.metrics import read_metrics
from astuner.run_record.run_facts import run_state, summary_of
from astuner.run_record.verdict import run_verdict
from astuner.viewer import queries
from astuner.viewer.failures import failures
from astuner.viewer.queries import EpisodeFilter
from astuner.viewer.tui.episodes_screen import EpisodesScreen
from astuner.viewer.tui.lists import STATE_STYLES, Listing, ListScreen, cell, count, lines, resampled

_CURVE_WIDTH = 24
_METRICS = (
    "reward/mean", "success/rate", "val/success_rate", "val/reward", "loss/sft", "val/loss", "loss/kl", "kl/update",
    "entropy", "grad_norm", "time/step",
)  # fmt: skip


class RunScreen(ListScreen):
    """A run: the verdict, the metrics, and the kinds of its episodes."""

    COLUMNS = ("episodes", "which")
    SEARCH = "text in the messages, answers or errors of the episodes"

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run
        self._opened: dict[str, tuple[EpisodeFilter, str]] = {}

    def read(self) -> Listing:
        """Read the run."""
        index = self.viewer.indexes.of(self.run)
        with index.reading() as db:
            counts = queries.counts(db)
            groups = index.cached(db, failures)
            series = queries.metrics(db, 0, None)["series"]
            splits = db.execute("select split, count(*) as n from episodes group by split order by split").fetchall()
        summary = summary_of(index.folder)
        state = run_state(index.folder, summary)
        title = Text.assemble(cell(self.run, 50, "bold"), "  ", (state, STATE_STYLES.get(state, "")))
        title.append(f"  step {counts['step']}, {count(counts['episodes'], 'episode')}")
        title.append(f", {counts['failed']:,} failed", style="red" if counts["failed"] else "dim")
        rows = read_metrics(index.folder, lambda _: None)
        verdict = run_verdict(summary, rows) if summary else None
        told = [*verdict.lines, *(f"  - {text}" for text in verdict.suggestions)] if verdict else []
        head = [cell(line, style="" if number else "bold") for number, line in enumerate(told)]
        head += [*([Text()] if told else []), *_metric_lines(series)]
        filters = {"all": (counts["episodes"], Text("all episodes"), EpisodeFilter())}
        names = {"train": "training", "val": "validation"}
        for row in splits:
            name = names.get(row["split"], row["split"])
            filters[f"split-{row['split']}"] = (row["n"], cell(f"{name} episodes"), EpisodeFilter(split=row["split"]))
        labels: dict[str, str] = {}
        for group in groups["groups"]:
            error = f"[{group['kind']}] {group['error'] or ''}"
            labels[f"failure-{group['key']}"] = error
            text = cell(error, style="red")
            text.append(f"  ({count(group['tasks'], 'task')})", style="dim")
            filters[f"failure-{group['key']}"] = (group["episodes"], text, EpisodeFilter(failure=group["key"]))
        self._opened = {key: (matching, labels.get(key, "")) for key, (_, _, matching) in filters.items()}
        cells = [(key, [Text(f"{n:,}", justify="right"), text]) for key, (n, text, _) in filters.items()]
        return Listing(title, lines(head), cells, len(cells))

    def open(self, key: str) -> None:
        """Show the episodes of the row."""
        self.app.push_screen(EpisodesScreen(self.run, *self._opened[key]))

    def _search_for(self, text: str) -> None:
        if text:
            self.app.push_screen(EpisodesScreen(self.run, EpisodeFilter(), text=text))


def _metric_lines(series: Mapping[str, Sequence[Sequence[float | None]]]) -> Iterator[Text]:
    """Yield a line with the curve for each main metric."""
    for name in _METRICS:
        values = [value for _, _, value in series.get(name, ()) if value is not None]
        if values:
            curve = spark_line(resampled(values, _CURVE_WIDTH), _CURVE_WIDTH)
            yield Text.assemble(
                f"{name:<18}", (f"{curve:<{_CURVE_WIDTH}}", "cyan"), f"  {values[0]:.4g} → {values[-1]:.4g}",
                (f"  {min(values):.4g} to {max(values):.4g}", "dim"),
            )  # fmt: skip
