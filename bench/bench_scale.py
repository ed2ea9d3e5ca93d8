"""Measure what a step of many episodes costs the process that runs it: bytes, seconds and the record.

Three workloads, each one step of `--episodes` episodes:

- `synthetic`: episodes of `--calls` calls each, whose last context has `--context` tokens. Each call extends the one
  before. The calls are recorded as those of agents are; samples, advantages, metrics, updates and the run record are
  those of a run. No model samples or trains: the completions and the trainer's values are random numbers.
- `verl`: the same, and the rows of the update are prepared and sent as in the main process of a run on verl. No worker
  receives them. This workload needs the environment of verl. The second-to-last line contains the additional memory of
  the update, in bytes per episode.
- `local`: a whole step of the local backbone with one short call an episode and a random model of 0.1 M parameters.

The last line is JSON: the numbers of episodes and calls, the bytes that the episodes of the step hold in memory, per
episode; episodes per second of the whole step; seconds in which the step waited for the record; peak resident memory in
GiB. Lines before it have further numbers, among them the seconds of processor time of all threads, which depend less on
other processes.

    python bench/bench_scale.py [--workload synthetic|verl] [--episodes 1000] [--calls 30] [--context 30000]
    python bench/bench_scale.py --workload local [--episodes 10000]
    python bench/bench_scale.py --table

To see what takes the time: `py-spy record -o profile.svg --gil -- python bench/bench_scale.py ...`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
GROUP = 8
TABLE_EPISODES = (100, 1_000, 10_000)
TABLE_CALLS = (1, 10, 30)
# Episodes whose size in memory is measured.
MEASURED = 200


@dataclass(frozen=True)
class Step:
    """The measurements of one step."""

    episodes: int
    calls: int
    driver_bytes: float
    seconds: float
    cpu_seconds: float
    record_seconds: float
    record_bytes: float
    times: dict[str, float]
    update_bytes: float

    def report(self) -> dict[str, float]:
        return {
            "episodes": self.episodes,
            "calls": self.calls,
            "driver_bytes_per_episode": round(self.driver_bytes / self.episodes),
            "episodes_per_second": round(self.episodes / self.seconds, 1),
            "record_seconds": round(self.record_seconds, 2),
            "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        }


def held_bytes(values: Sequence[object]) -> int:
    """Return the bytes of objects and of all that they refer to, each object counted once."""
    seen: set[int] = set()
    stack: list[Any] = list(values)
    total = 0
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, type) or callable(value):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)  # of an array, including its numbers, but not those of the array that it views
        if isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            stack += value
        elif is_dataclass(value):
            stack += [getattr(value, field.name) for field in fields(value)]
        if (base := getattr(value, "base", None)) is not None:
            stack.append(base)
        stack += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    return total


class Meter:
    """Measures the episodes of a rollout, and the processor time from its start on.

    Attributes:
        held: bytes that the episodes hold.
        waited: seconds for which the training loop waited for the record in all.
        started: processor time of all threads at the start, seconds.
        seconds: seconds that the measurement itself took.
    """

    held = 0.0
    waited = 0.0
    started = 0.0
    seconds = 0.0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Measure the training step of the block."""
        from astuner.backbone.training import rl_loop

        run_batch = rl_loop.run_batch

        def measured(*arguments: Any) -> Any:
            self.started = time.process_time()
            episodes = run_batch(*arguments)
            before, clock = time.process_time(), time.monotonic()
            chosen = episodes[:: max(1, len(episodes) // MEASURED)]
            self.held = held_bytes(chosen) / len(chosen) * len(episodes)
            self.started += time.process_time() - before
            self.seconds += time.monotonic() - clock
            return episodes

        class MeasuredWriter(rl_loop.StepWriter):
            def seconds_waited(writer) -> float:
                seconds = super().seconds_waited()
                self.waited += seconds
                return seconds

            def __exit__(writer, *error: Any) -> None:
                super().__exit__(*error)
                writer.seconds_waited()

        writer = rl_loop.StepWriter
        rl_loop.run_batch = measured  # type: ignore[assignment]
        rl_loop.StepWriter = MeasuredWriter  # type: ignore[misc]
        try:
            yield
        finally:
            rl_loop.run_batch, rl_loop.StepWriter = run_batch, writer  # type: ignore[misc]


def configuration(folder: Path, workload: str, episodes: int, calls: int, context: int) -> Path:
    """Write the tasks, the model and the YAML file of a workload; return the path of the YAML file."""
    # A package in the environment of verl is also called `tests`.
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/backbone/verl")]
    from scale_agent import save_model

    groups = max(1, episodes // GROUP)
    rows = [json.dumps({"question": f"What is {10 + n % 90} + {10 + n // 90}?", "answer": ""}) for n in range(groups)]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    save_model(folder / "model")
    agent = shutil.copy(FOLDER / "scale_agent.py", folder / "one_answer.py")
    config = {
        "experiment_name": "scale",
        "backbone": "local",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "task_reader": {"type": "dataset_file", "dataset_file": {"training": {"file_path": "tasks.jsonl"}}},
        "data": {
            "train_batch_size": groups,
            "shuffle": False,
            "max_prompt_length": max(context, 256),
            "max_response_length": max(context, 256),
        },
        "rollout": {
            "agentscope_workflow": f"{agent}->OneAnswer",
            "num_repeat": min(GROUP, episodes),
            "temperature": 1.0,
            "max_env_worker": 128,
            "max_response_length_in_one_turn": 4,
            "max_model_len": 512 if workload == "local" else 2 * max(context, 256),
            "compute_madness_checklist": [],
        },
        "trainer_common": {
            "device": "cpu",
            "total_training_steps": 1,
            "save_freq": 10_000,
            "use_kl_loss": False,
            "logger": [],
            "optim": {"lr": 1e-4},
        },
    }
    path = folder / "scale.yaml"
    path.write_text(json.dumps({"astuner": config}))  # JSON is YAML
    return path


def run_step(workload: str, episodes: int, calls: int, context: int, folder: Path) -> Step:
    """Run one training step and return its measurements."""
    from astuner.backbone.local import backbone
    from astuner.config.loading import load_config
    from astuner.launcher import launch
    from astuner.run_record import read_metrics

    if workload != "local":
        from scale_session import synthetic_session

        def session(self: object, run: Any, *, trains: bool) -> Any:
            return synthetic_session(run, workload, calls, context)

        backbone.LocalBackbone.session = session  # type: ignore[assignment]
    loaded = load_config(configuration(folder, workload, episodes, calls, context))
    meter = Meter()
    with meter.installed():
        launch.Launcher.from_loaded(loaded, exp_dir=str(folder / "records")).train()
    cpu_seconds = time.process_time() - meter.started
    record = folder / "records/scale"
    metrics = {name: value for row in read_metrics(record) for name, value in row.metrics.items()}
    assert metrics["episodes/ok"] == metrics["episodes/total"], metrics
    times = {name: float(value or 0.0) for name, value in metrics.items() if name.startswith("time/")}
    for name in ("time/rollout", "time/step"):
        times[name] -= meter.seconds
    # The loop waits for the record of the last step after its metrics.
    times["time/step"] += meter.waited - times["time/record"]
    size = sum(path.stat().st_size for path in (record / "episodes").rglob("*") if path.is_file())
    return Step(
        episodes=int(metrics["episodes/total"] or 0),
        calls=int((metrics["calls/total"] or 0) / (metrics["episodes/total"] or 1)),
        driver_bytes=meter.held,
        seconds=times["time/step"],
        cpu_seconds=cpu_seconds,
        record_seconds=meter.waited,
        record_bytes=size,
        times=times,
        update_bytes=metrics.get("update/driver_bytes") or 0.0,
    )


def row(step: Step) -> dict[str, float]:
    """Return the measurements of a step per episode."""
    return {
        "cpu_ms_per_episode": round(1000 * step.cpu_seconds / step.episodes, 2),
        "record_bytes_per_episode": round(step.record_bytes / step.episodes),
        "update_bytes_per_episode": round(step.update_bytes / step.episodes),
        **{name: round(value, 2) for name, value in step.times.items()},
    }


def table() -> None:
    """Print a Markdown table of the cost per episode; each cell is measured in its own process."""
    print(
        "| episodes | calls | tokens of the last context | CPU ms | bytes in memory | bytes of the record | peak GiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for calls in TABLE_CALLS:
        for episodes in TABLE_EPISODES:
            words = ["--episodes", str(episodes), "--calls", str(calls), "--context", str(1_000 * calls)]
            process = subprocess.run(
                [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True, env=environment()
            )
            more, result = map(json.loads, process.stdout.splitlines()[-2:])
            cells = [
                episodes, calls, 1_000 * calls, more["cpu_ms_per_episode"], result["driver_bytes_per_episode"],
                more["record_bytes_per_episode"], result["peak_rss_gb"],
            ]  # fmt: skip
            print(f"| {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)


def environment() -> dict[str, str]:
    """Return the environment of child processes: the modules of this checkout first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workload", choices=("synthetic", "verl", "local"), default="synthetic")
    parser.add_argument("--episodes", type=int, default=1_000, help="episodes of the step, a multiple of 8")
    parser.add_argument("--calls", type=int, default=30, help="calls per synthetic episode")
    parser.add_argument("--context", type=int, default=30_000, help="tokens of the last call, with its completion")
    parser.add_argument("--folder", type=Path, help="folder for the record, instead of a temporary one")
    parser.add_argument("--table", action="store_true", help="print the table of all sizes")
    arguments = parser.parse_args()
    if arguments.table:
        table()
        return
    with tempfile.TemporaryDirectory(prefix="bench_scale_") as name:
        folder = arguments.folder or Path(name)
        step = run_step(arguments.workload, arguments.episodes, arguments.calls, arguments.context, folder)
    print(json.dumps(row(step)))
    print(json.dumps(step.report()))


if __name__ == "__main__":
    main()
