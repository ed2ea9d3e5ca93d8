"""Plots of a run: `plots/reward.png` and `plots/loss.png`."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from astuner.errors import RecordError
from astuner.run_record.files import write_atomically
from astuner.run_record.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FOLDER = "plots"
TRAIN, VALIDATION, _LOSS, _KL = "#2563eb", "#c2410c", "#475569", "#7c3aed"
INK, MUTED, _GRID = "#1e293b", "#94a3b8", "#e2e8f0"
# From this number of steps on, a moving mean is drawn over the noisy values.
_SMOOTH_FROM = 40
# Above the common factor of the labels (`1e-6`) at the axis's top.
_TITLE_Y = 1.05


@dataclass(frozen=True, slots=True)
class _Series:
    """Values by ascending step; NaN for values that were recorded as null."""

    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Panel:
    """One pair of axes: a line for a training metric and points for a validation metric."""

    title: str
    label: str
    line: str
    line_label: str
    colour: str = TRAIN
    points: str = ""
    is_share: bool = False


_REWARD_PANELS = (
    _Panel("Reward", "mean reward", "reward/mean", "training, per step", points="val/reward"),
    _Panel(
        "Success", "episodes solved", "success/rate", "training, per step", points="val/success_rate", is_share=True
    ),
)
_LOSS_PANELS = (
    _Panel("Policy loss", "loss", "loss/policy", "policy loss", colour=_LOSS),
    _Panel("KL to the starting model", "estimated KL", "loss/kl", "KL", colour=_KL),
    _Panel("Supervised loss", "cross-entropy (nats per token)", "loss/sft", "training loss", colour=_LOSS),
)


def plot_run(folder: Path) -> list[Path]:
    """Plot rewards and losses of `metrics.jsonl` as PNG files under `plots/`, and return the files' paths.

    `reward.png` and `loss.png` are written only if the run has such metrics.

    Raises:
        RecordError: If the metrics cannot be read, or a file cannot be written.
    """
    damaged: list[RecordError] = []
    values: dict[str, dict[int, float]] = {}
    for row in read_metrics(folder, damaged.append):
        for name, value in row.metrics.items():
            values.setdefault(name, {})[row.step] = math.nan if value is None else value
    series = {
        name: _Series(sorted(by_step), [by_step[step] for step in sorted(by_step)])
        for name, by_step in values.items()
        if any(map(math.isfinite, by_step.values()))
    }
    if damaged:
        logger.warning("the plots lack {} damaged lines; the first: {}", len(damaged), damaged[0])
    written = []
    for name, panels in (("reward.png", _REWARD_PANELS), ("loss.png", _LOSS_PANELS)):
        present = [panel for panel in panels if panel.line in series or panel.points in series]
        if present:
            path = folder / _FOLDER / name
            write_atomically(path, _draw(folder.name, present, series))
            written.append(path)
    return written


def _draw(experiment: str, panels: Sequence[_Panel], series: Mapping[str, _Series]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Fixed margins: matplotlib's layouts draw a figure twice, which takes longer than the steps of a short run.
    width = 5.4 * len(panels)
    figure = Figure(figsize=(width, 4.0), facecolor="white")
    figure.subplots_adjust(left=0.95 / width, right=1 - 0.1 / width, bottom=0.13, top=0.82, wspace=0.23)
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, series)
    # The font lacks some characters that names may hold; dollar signs must not start a formula.
    title = experiment.encode("ascii", "replace").decode()
    figure.suptitle(title, x=0.008, ha="left", color=MUTED, fontsize=10, parse_math=False)
    image = io.BytesIO()
    # A stronger compression takes a third of the time of a plot, for files that are a seventh smaller.
    figure.savefig(image, format="png", dpi=150, pil_kwargs={"compress_level": 1})
    return image.getvalue()


def _draw_panel(axes: Axes, panel: _Panel, series: Mapping[str, _Series]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    style_axes(axes, panel.title, "training step", panel.label, _TITLE_Y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.is_share:
        axes.set_ylim(-0.02, 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.line in series:
        _draw_line(axes, panel, series[panel.line])
    if panel.points in series:
        _draw_validation(axes, panel, series[panel.points])
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    low, high = axes.dataLim.intervalx
    if low == high:
        axes.set_xlim(low - 1, high + 1)


def style_axes(axes: Axes, title: str, x_label: str, y_label: str, title_y: float | None = None) -> None:
    """Set the axes' title, labels and colors, as in all astuner plots; `title_y` is the height of the title."""
    axes.set_title(title, loc="left", y=title_y, color=INK, fontsize=12, fontweight="bold")
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9)


def _draw_line(axes: Axes, panel: _Panel, series: _Series) -> None:
    steps, values = series.steps, series.values
    if len(steps) < _SMOOTH_FROM:
        # Markers show a single value between gaps.
        axes.plot(steps, values, color=panel.colour, linewidth=1.6, marker="o", markersize=3, label=panel.line_label)
        return
    axes.plot(steps, values, color=panel.colour, linewidth=0.8, alpha=0.3, label=panel.line_label)
    radius = max(2, len(steps) // 40)
    # The means of the finite values at distance up to `radius`; NaN where there is none.
    sums = [0.0, *itertools.accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *itertools.accumulate(int(math.isfinite(value)) for value in values)]
    smooth = []
    for index in range(len(values)):
        low, high = max(0, index - radius), min(len(values), index + radius + 1)
        count = counts[high] - counts[low]
        smooth.append((sums[high] - sums[low]) / count if count else math.nan)
    axes.plot(steps, smooth, color=panel.colour, linewidth=2.0, label=f"mean over {2 * radius + 1} steps")


def _draw_validation(axes: Axes, panel: _Panel, series: _Series) -> None:
    """Draw the points, mark the first and the last, and write their values next to the title."""
    measured = [pair for pair in zip(series.steps, series.values, strict=True) if math.isfinite(pair[1])]
    steps, values = zip(*measured, strict=True)
    axes.plot(steps, values, color=VALIDATION, linewidth=1.2, linestyle=(0, (4, 3)), marker="o", markersize=3,
              label="validation", zorder=3)  # fmt: skip
    labels = []
    for word, index, fill in (("before", 0, "white"), ("after", -1, VALIDATION)):
        # Step 0 is the starting model; a later step is not.
        if (word == "before") == (steps[index] == 0):
            axes.plot(steps[index], values[index], color=VALIDATION, marker="D", markersize=8, markerfacecolor=fill,
                      markeredgewidth=1.6, linestyle="none", label=f"validation {word}", zorder=4)  # fmt: skip
            labels.append(f"{word} {values[index]:.1%}" if panel.is_share else f"{word} {values[index]:.3f}")
    axes.set_title(" → ".join(labels), loc="right", y=_TITLE_Y, color=VALIDATION, fontsize=10, fontweight="bold")
