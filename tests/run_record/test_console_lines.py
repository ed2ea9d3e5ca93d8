"""The console's lines of a run: one for each step and validation, within 80 columns; the details are in the log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger

from astuner.run_record.console_lines import FILE_ONLY, ConsoleLogger, spark_line
from astuner.run_record.metrics import MetricsRow

EPISODES = {"episodes/total": 64.0, "episodes/failed": 0.0, "episodes/dropped": 0.0, "calls/total": 128.0}
EPISODES |= {"samples/total": 64.0, "tokens/raw": 15360.0, "tokens/distinct": 9216.0, "tokens/trained": 4096.0}
EPISODES |= {"tokens/saving": 15360 / 9216, "forks/tools_changed": 0.0, "forks/truncated": 1.0}
EPISODES |= {"forks/template_rewrote_history": 3.0}


class Lines:
    """What reaches the console and what only the log file."""

    def __init__(self) -> None:
        self.console: list[str] = []
        self.file: list[str] = []
        self.now = 0.0

    def logger(self) -> ConsoleLogger:
        return ConsoleLogger(clock=lambda: self.now)


@pytest.fixture
def lines() -> Iterator[Lines]:
    shown = Lines()

    def write(message: object) -> None:
        record = message.record  # type: ignore[attr-defined]
        (shown.file if record["extra"].keys() >= FILE_ONLY.keys() else shown.console).append(record["message"])

    handler = logger.add(write, level="INFO", format="{message}")
    yield shown
    logger.remove(handler)


def test_a_step_is_one_line_and_its_details_are_in_the_log(lines: Lines) -> None:
    console = lines.logger()
    console.expect_steps(32)
    metrics = EPISODES | {"reward/mean": 0.5, "success/rate": 0.84, "time/step": 8.1, "lr": 1e-6, "some/detail": 1.0}
    for step, reward in enumerate((0.1, 0.4, 0.8), start=5):
        lines.now += 10.0
        console.log(step, metrics | {"reward/mean": reward})
    # 28.1 s for three steps, and 25 are left.
    assert lines.console[-1] == "step 7/32  reward 0.80 ▁▄█  success 84%  8.1 s  eta 3:54"
    assert lines.file[-2:] == [
        "step 7 · reward/mean 0.8 · success/rate 0.84 · lr 1e-06 · time/step 8.1",
        "step 7: 64 episodes, 128 calls → 64 samples, 15,360 → 9,216 distinct → 4,096 trained tokens (saving 1.7×), "
        "forks: 3 template_rewrote_history, 1 truncated",
    ]
    console.log(8, {"some/detail": 1.0})
    assert len(lines.console) == 3


def test_lost_episodes_are_named_and_the_line_fits_80_columns(lines: Lines) -> None:
    console = lines.logger()
    console.expect_steps(1000)
    console.restart([MetricsRow(step, 0.0, {"reward/mean": float(step)}) for step in range(20)])
    lost = EPISODES | {"episodes/failed": 2.0, "reward/mean": 0.25, "success/rate": 1.0, "time/step": 8.0}
    console.log(900, lost)
    assert lines.console == ["step 900/1000  reward 0.25 ▆▆▇▇▇██▁  success 100%  8.0 s  eta 13:20  2 failed"]
    assert len(lines.console[0]) <= 80
    one = dict.fromkeys(EPISODES, 0.0) | {"episodes/total": 1.0, "episodes/failed": 1.0, "lr": 0.0}
    console.log(901, one)
    assert lines.file[-1].startswith("step 901: 1 episode (1 failed), 0 calls → 0 samples")


def test_a_validation_has_an_interval(lines: Lines) -> None:
    console = lines.logger()
    console.expect_steps(32)
    rates = {"val/success_rate": 0.84, "val/reward": 0.9, "val/episodes": 100.0, "val/lost": 3.0}
    console.log(8, rates | {"time/validation": 12.34})
    text = "step 8/32  validation  success 84% (76% to 90%)  reward 0.90  100 episodes  3 lost  12.3 s"
    assert lines.console == [text]


def test_a_validation_of_a_mixture_has_a_line_by_source(lines: Lines) -> None:
    console = lines.logger()
    rates = {
        "val/success_rate": 0.84,
        "val/episodes": 100.0,
        "val/success_rate/sums": 0.9,
        "val/success_rate/legs": 0.5,
    }
    console.log(0, rates)
    assert lines.console[1:] == ["  success by source: sums 90%, legs 50%"]


def test_fast_steps_are_shown_every_ten_seconds(lines: Lines) -> None:
    console = lines.logger()
    for step in range(1, 1001):
        console.log(step, {"loss/sft": 1.0 / step})
        lines.now += 0.125
    assert [line.split("  ")[0] for line in lines.console] == [f"step {step}" for step in range(1, 1001, 80)]
    console.log(1001, {"val/loss": 0.5})
    console.log(1002, {"reward/mean": 0.5})
    console.log(1003, {"loss/sft": 0.5})
    assert lines.console[13:] == ["step 1001  validation  loss 0.5000", "step 1002  reward 0.50 ▄"]


def test_spark_line_is_scaled_to_its_values() -> None:
    assert spark_line([]) == ""
    assert spark_line([5.0, 5.0]) == "▄▄"
    assert spark_line([0.0, 7.0, 3.0]) == "▁█▄"
    assert spark_line(list(range(100))) == "▁▂▃▄▅▆▇█"
