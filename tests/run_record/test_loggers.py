from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loguru import logger

from astuner.errors import ConfigError, RecordError
from astuner.run_record import read_metrics
from astuner.run_record.loggers import RunName, TensorboardLogger, check_loggers, open_loggers
from astuner.run_record.metrics import MetricsFile, MetricsRow
from astuner.run_record.record import RunRecord

TensorboardEvents = Callable[[Path], dict[str, list[tuple[int, float]]]]

# The parts of the trackers' interfaces that we use, written to a file instead of a server.
STAND_INS = {
    "wandb": """
import os, types
def setup():
    return types.SimpleNamespace(settings=types.SimpleNamespace(mode=os.environ.get("WANDB_MODE", "online")))
def login(verify):
    if "WANDB_API_KEY" not in os.environ:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")
    return True
class Settings:
    def __init__(self, **settings):
        self.settings = settings
def init(**arguments):
    assert arguments.pop("settings").settings["console"] == "off"
    return Run(arguments)
""",
    "swanlab": "def init(**arguments):\n    return Run(arguments)\n",
    "trackio": "def init(**arguments):\n    return Run(arguments)\n",
}
RUN = """
import json, pathlib
class Run:
    def __init__(self, arguments):
        self.events = [arguments]
    def log(self, metrics, step):
        if step == 13:
            raise OSError("network is down")
        self.events.append([step, metrics])
    def finish(self):
        pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(self.events, default=str))
"""


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Collect log messages."""
    captured: list[str] = []
    handler = logger.add(captured.append, format="{level}: {message}")
    yield captured
    logger.remove(handler)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Install a module for this test and return the path of its results."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def make(name: str, source: str) -> Path:
        (site / f"{name}.py").write_text(source)
        return site / f"{name}.json"

    yield make
    for name in STAND_INS:
        sys.modules.pop(name, None)


def test_metrics_come_back_in_order(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.log(1, {"reward/mean": 0.5, "lr": 1e-6})
    file.log(1, {"val/reward": 1})
    file.log(2, {})
    file.close()
    rows = read_metrics(tmp_path)
    assert [(row.step, row.metrics) for row in rows] == [
        (1, {"reward/mean": 0.5, "lr": 1e-6}),
        (1, {"val/reward": 1.0}),
        (2, {}),
    ]
    assert rows[0].time <= rows[1].time <= rows[2].time


def test_values_that_are_not_numbers_become_null_with_one_warning(tmp_path: Path, messages: list[str]) -> None:
    file = MetricsFile(tmp_path)
    assert file.log(1, {"a": math.nan, "b": math.inf, "c": 1.0}) == {"c": 1.0}
    file.log(2, {"a": -math.inf})
    file.close()
    assert [row.metrics for row in read_metrics(tmp_path)] == [{"a": None, "b": None, "c": 1.0}, {"a": None}]
    (message,) = messages
    assert message.startswith("WARNING: step 1: ")
    assert "a is nan, b is inf" in message


def test_line_without_its_fields_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RecordError, match="a line has no 'time'"):
        read_metrics(tmp_path)


def test_tensorboard_shows_the_metrics(tmp_path: Path, tensorboard_events: TensorboardEvents) -> None:
    sink = TensorboardLogger(tmp_path)
    sink.log(1, {"reward/mean": 0.25, "loss/kl": 2.0})
    sink.log(2, {"reward/mean": 0.5})
    sink.close()
    assert tensorboard_events(tmp_path) == {"reward/mean": [(1, 0.25), (2, 0.5)], "loss/kl": [(1, 2.0)]}


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(
    tmp_path: Path, tensorboard_events: TensorboardEvents
) -> None:
    killed = TensorboardLogger(tmp_path)
    for step in (1, 2, 3, 4):
        killed.log(step, {"reward/mean": step})
    resumed = TensorboardLogger(tmp_path)
    resumed.restart([MetricsRow(step, 1e9 + step, {"reward/mean": float(step)}) for step in (1, 2)])
    resumed.log(3, {"reward/mean": 30})
    resumed.close()
    killed.close()
    assert tensorboard_events(tmp_path) == {"reward/mean": [(1, 1.0), (2, 2.0), (3, 30.0)]}


DISK_FULL = """
import resource, sys
from pathlib import Path
from astuner.errors import RecordError
from astuner.run_record.loggers import TensorboardLogger
sink = TensorboardLogger(Path(sys.argv[1]))
sink.log(1, {"reward/mean": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
try:
    for step in range(2, 99):
        sink.log(step, {"reward/mean": 1.0})
except RecordError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink.log(99, {"reward/mean": 1.0})
sink.close()
"""


def test_tensorboard_continues_after_a_full_disk(tmp_path: Path, tensorboard_events: TensorboardEvents) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DISK_FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "tensorboard: File too large" in done.stdout
    assert "Traceback" not in done.stderr
    steps = [step for step, _ in tensorboard_events(tmp_path)["reward/mean"]]
    assert (steps[0], steps[-1]) == (1, 99)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_tracker_gets_the_metrics_and_ends(
    tmp_path: Path,
    name: str,
    install: Callable[[str, str], Path],
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    result = install(name, RUN + STAND_INS[name])
    check_loggers([name])  # type: ignore[list-item]
    (sink,) = open_loggers([name, name], RunName("proj", "exp", tmp_path))  # type: ignore[list-item]
    sink.log(1, {"reward/mean": 0.5})
    sink.log(13, {"reward/mean": 0.6})
    sink.log(13, {"reward/mean": 0.6})
    sink.close()
    arguments, *events = json.loads(result.read_text())
    assert arguments["project"] == "proj"
    assert (arguments.get("name") or arguments["experiment_name"]).startswith("exp-")
    assert events == [[1, {"reward/mean": 0.5}]]
    assert [message.rpartition(";")[0] for message in messages] == [
        f"WARNING: {name} failed: OSError('network is down'); metrics.jsonl is complete"
    ]


def test_tracker_that_does_not_start_is_a_clear_error(tmp_path: Path, install: Callable[[str, str], Path]) -> None:
    install("trackio", "def init(**arguments):\n    raise ValueError('not logged in')\n")
    with pytest.raises(ConfigError, match=r"names trackio, which did not start: not logged in; run `trackio login`"):
        list(open_loggers(["trackio"], RunName("p", "e", tmp_path)))


def test_wandb_without_a_key_is_rejected_before_an_earlier_record_is_moved(
    tmp_path: Path, install: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("wandb", RUN + STAND_INS["wandb"])
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with RunRecord.open(tmp_path / "run", backbone="debug", config_yaml="", resume=False, loggers=()):
        pass
    with pytest.raises(ConfigError, match=r"wandb, which has no API key; run `wandb login`, .*WANDB_MODE=offline"):
        RunRecord.open(tmp_path / "run", backbone="debug", config_yaml="", resume=False, loggers=["wandb"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_loggers(["wandb"])


def test_missing_tracker_names_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder that a tracker creates in the working directory is not its package.
    (tmp_path / "swanlab").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"not installed: wandb, swanlab; run `pip install wandb swanlab`"):
        check_loggers(["console", "wandb", "swanlab", "tensorboard"])


def test_trackers_are_imported_only_if_configured(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from astuner.run_record.record import RunRecord
heavy = ("torch", "tensorflow", "wandb", "swanlab", "trackio", "tensorboard", "matplotlib")
with RunRecord.open(Path({str(tmp_path / "exp")!r}), backbone="local", config_yaml="", resume=False) as record:
    print([name for name in heavy if name in sys.modules])
    record.log_metrics(1, {{"reward/mean": 1.0}})
    print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['tensorboard']"]
