from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from matplotlib.image import imread

from astuner.errors import RecordError
from astuner.run_record.metrics import MetricsFile
from astuner.run_record.plots import plot_run

TRAIN, VALIDATION, LOSS, KL = "#2563eb", "#c2410c", "#475569", "#7c3aed"


def write(folder: Path, rows: list[tuple[int, Mapping[str, float]]]) -> Path:
    folder.mkdir(exist_ok=True)
    file = MetricsFile(folder)
    for step, metrics in rows:
        file.log(step, metrics)
    file.close()
    return folder


def pixels_of(path: Path, colour: str) -> int:
    """Count the pixels of exactly this colour."""
    image = imread(io.BytesIO(path.read_bytes()), format="png")
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    close = abs(image[..., 0] - red) + abs(image[..., 1] - green) + abs(image[..., 2] - blue) < 0.01
    return int(close.sum())


def width_of(path: Path) -> int:
    return int(imread(io.BytesIO(path.read_bytes()), format="png").shape[1])


def test_plots_of_an_rl_run(tmp_path: Path) -> None:
    rows: list[tuple[int, Mapping[str, float]]] = [(0, {"val/reward": 0.5, "val/success_rate": 0.5})]
    rows += [
        (step, {"reward/mean": step / 60, "success/rate": step / 60, "loss/policy": 0.1, "loss/kl": step / 100})
        for step in range(1, 61)
    ]
    rows += [(60, {"val/reward": 0.97, "val/success_rate": 0.97})]
    reward, loss = plot_run(write(tmp_path / "exp", rows))
    assert (reward.name, loss.name) == ("reward.png", "loss.png")
    assert min(pixels_of(reward, TRAIN), pixels_of(reward, VALIDATION)) > 500
    assert min(pixels_of(loss, LOSS), pixels_of(loss, KL)) > 500


def test_plots_of_a_supervised_run(tmp_path: Path) -> None:
    (loss,) = plot_run(write(tmp_path / "exp", [(step, {"loss/sft": 1 / step}) for step in range(1, 20)]))
    assert loss.name == "loss.png"
    assert pixels_of(loss, LOSS) > 200
    assert pixels_of(loss, KL) == 0
    two_panels = write(tmp_path / "rl", [(1, {"loss/policy": 1.0, "loss/kl": 1.0})])
    assert width_of(plot_run(two_panels)[0]) == 2 * width_of(loss)


def test_a_single_point_is_drawn(tmp_path: Path) -> None:
    reward, _ = plot_run(write(tmp_path / "exp", [(1, {"reward/mean": 0.3, "loss/policy": 0.0})]))
    assert pixels_of(reward, TRAIN) > 10


def test_value_between_two_gaps_is_drawn_and_only_gaps_are_not_a_plot(tmp_path: Path) -> None:
    rows: list[tuple[int, Mapping[str, float]]] = [
        (1, {"reward/mean": math.nan, "loss/kl": math.nan}),
        (2, {"reward/mean": 0.5, "loss/kl": math.inf}),
        (3, {"reward/mean": math.nan}),
    ]
    (reward,) = plot_run(write(tmp_path / "exp", rows))
    assert pixels_of(reward, TRAIN) > 10


def test_validation_of_a_run_without_steps_is_drawn(tmp_path: Path) -> None:
    (reward,) = plot_run(write(tmp_path / "exp", [(0, {"val/reward": 0.5})]))
    assert pixels_of(reward, VALIDATION) > 50
    assert pixels_of(reward, TRAIN) == 0


def test_names_with_dollars_and_non_ascii_letters(tmp_path: Path) -> None:
    assert plot_run(write(tmp_path / "a_$x^{$_名", [(1, {"reward/mean": 1.0})]))


def test_no_metrics_give_no_plot_and_no_file_is_an_error(tmp_path: Path) -> None:
    assert plot_run(write(tmp_path / "exp", [])) == []
    with pytest.raises(RecordError, match=r"metrics\.jsonl"):
        plot_run(tmp_path / "nothing")


def test_the_global_state_of_pyplot_is_not_used(tmp_path: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    plot_run(write(tmp_path / "exp", [(1, {"reward/mean": 1.0})]))
    assert ("matplotlib.pyplot" in sys.modules) == before
