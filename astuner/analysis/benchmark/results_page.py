"""Result pages, including the page for the published results, `docs/en/results.md`, made from `docs/results/*.json`.

python -m astuner.analysis.benchmark.results_page docs
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from astuner.analysis.benchmark.report import draw_curves, draw_results, interval_text, result_cells, versions_text
from astuner.analysis.benchmark.results import BenchResult, read_results
from astuner.run_record.files import write_atomically

_PICTURES = Path("assets/results")
_TITLE = "# Results\n\n"
_PUBLISHED = """\
This page is generated from the files in `docs/results/` by `make results`. [Benchmarks](benchmarks.md) explains the
commands, the interval and the comparison of results. The suite is `tutorial/benchmark.yaml`:

```text
astuner bench tutorial/benchmark.yaml
```

Its entries need two extras, and its runs on verl and trinity the environments of these backbones. The runs need no GPU:

```text
pip install -e ".[gymnasium,smollm]"
astuner install verl
astuner install trinity
```

On local, the five seeds of the suite are published; on verl and trinity, the seeds 1 to 3 (`--seeds 3`).

"""
_TERMS = """\
`before` and `after` are the mean success rates of the starting and the tuned model on held-out tasks, which are not
among the training tasks. The gain is in percentage points, with its 95% bootstrap interval over the seeds. Tokens and
time are means of a run.

"""


def results_page(results: Sequence[BenchResult], pictures: str, introduction: str = "") -> str:
    """Return a page in Markdown: a table of all results, and a section for each.

    Args:
        results: the results.
        pictures: folder of the pictures, relative to the page: `gains.png`, and one per result with its name.
        introduction: Markdown before the explanation of the table.
    """
    header = ("entry", "backbone", "seeds", "before", "after", "gain", "95% interval", "tokens", "time")
    rows = [[f"[{result.suite}](#{_anchor(result)})", result.backbone, *result_cells(result)] for result in results]
    gains = f"\n![Gains of all entries]({pictures}/gains.png)\n"
    sections = [_section(result, pictures) for result in results]
    return "".join([_TITLE, introduction, _TERMS, _table(header, rows), _agreement(results), gains, *sections])


def published_page(results: Sequence[BenchResult]) -> str:
    """Return the page of the published results."""
    return results_page(results, f"../{_PICTURES}", _PUBLISHED)


def _agreement(results: Sequence[BenchResult]) -> str:
    """Return a sentence for each entry with several backbones: whether their intervals have a common part."""
    by_entry: dict[str, dict[str, tuple[float, float]]] = {}
    for result in results:
        if result.ci95 is not None:
            by_entry.setdefault(result.suite, {})[result.backbone] = result.ci95
    sentences = []
    for entry, intervals in by_entry.items():
        if len(intervals) > 1:
            low, high = max(low for low, _ in intervals.values()), min(high for _, high in intervals.values())
            common = f"overlap: {interval_text((low, high))} is in all of them" if low <= high else "do not all overlap"
            sentences.append(f"\nThe intervals of `{entry}` on {', '.join(intervals)} {common}.\n")
    return "".join(sentences)


def _section(result: BenchResult, pictures: str) -> str:
    rows = [
        [str(seed.seed), f"{seed.before:.1%}", f"{seed.after:.1%}", f"{100 * seed.gain:+.1f}", f"{seed.seconds:.0f} s"]
        for seed in result.seeds
    ]
    first = result.seeds[0]
    length = (
        ""
        if first.steps is None or first.episodes is None
        else f"{first.steps} steps; {first.episodes} episodes on held-out tasks per validation. "
    )
    lines = [
        f"\n## {_title(result)}\n\n",
        f"{length}Starting model: `{result.model}`.{f' Date: {result.date}.' if result.date else ''}\n",
        f"\n{result.note}\n" if result.note else "",
        f"\n```text\n{result.command}\n```\n\n",
        _table(("seed", "before", "after", "gain", "time"), rows),
        _source_table(result),
        f"\nThe runs of seeds {', '.join(map(str, result.failed_seeds))} failed.\n" if result.failed_seeds else "",
        f"\n![Validation curves of {_title(result)}]({pictures}/{result.name}.png)\n",
        f"\nVersions: {versions_text(result)}.\n",
    ]
    return "".join(lines)


def _source_table(result: BenchResult) -> str:
    """Return a table with the gains by mixture reader; "" without a mixture."""
    if not result.sources:
        return ""
    rows = [
        [name, f"{gain.before:.1%}", f"{gain.after:.1%}", f"{100 * gain.mean_gain:+.1f}", interval_text(gain.ci95)]
        for name, gain in result.sources.items()
    ]
    return "\n" + _table(("tasks", "before", "after", "gain", "95% interval"), rows)


def _title(result: BenchResult) -> str:
    return f"{result.suite} on {result.backbone}"


def _anchor(result: BenchResult) -> str:
    return _title(result).lower().replace(" ", "-")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def picture_digest(results: Sequence[BenchResult]) -> str:
    """Return the text that a picture of these results contains; it differs for other numbers."""
    return hashlib.sha256("\n".join(result.model_dump_json() for result in results).encode()).hexdigest()


def write_page(docs: Path) -> None:
    """Write the page of the published results and its pictures from the results in `docs/results`.

    Raises:
        RecordError: If a result cannot be read, or a file cannot be written.
    """
    results = read_results(docs / "results")
    for result in results:
        draw_curves(docs / _PICTURES / f"{result.name}.png", result, picture_digest([result]))
    draw_results(docs / _PICTURES / "gains.png", results, picture_digest(results))
    write_atomically(docs / "en/results.md", published_page(results).encode())


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
