"""The astuner process of bench_step.py: the local backbone, as `astuner --conf` runs it, paused between steps."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from step_task import Gate, Sizes, questions

from astuner.backbone.training.progress import RunProgress
from astuner.config.loading import load_config
from astuner.launcher import launch
from astuner.run_record import read_episode, read_index


class GatedProgress(RunProgress):
    """The progress of a run. It waits at the gate before the first training step and after each."""

    def __init__(self, console: Console, gate: Gate, **more: bool) -> None:
        super().__init__(console, **more)
        self._gate = gate

    @contextlib.contextmanager
    def bar(self, title: str, total: int, done: int = 0, **more: Any) -> Iterator[Any]:
        with super().bar(title, total, done, **more) as advance:
            if title == "training":
                self._gate.wait()
            yield advance
        if title.endswith(": update"):
            self._gate.wait()


def configuration(folder: Path, sizes: Sizes) -> Path:
    """Write the YAML file and the tasks, and return the path of the YAML file."""
    rows = [json.dumps({"question": question, "answer": ""}) for question in questions(sizes)]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    agent = Path(__file__).with_name("step_agent.py")
    config = {
        "experiment_name": "bench",
        "model": {"path": str(folder / "model"), "dtype": sizes.dtype},
        "task_reader": {"type": "dataset_file", "dataset_file": {"training": {"file_path": "tasks.jsonl"}}},
        "data": {"train_batch_size": sizes.prompts, "shuffle": False},
        "rollout": {
            "agentscope_workflow": f"{agent}->OneAnswer",
            "num_repeat": sizes.group,
            "temperature": 1.0,
            "max_response_length_in_one_turn": sizes.tokens,
            "max_model_len": 1024,
            "compute_madness_checklist": [],
        },
        "trainer_common": {
            "total_epochs": 1,
            "save_freq": 10_000,
            "use_kl_loss": False,
            "optim": {"lr": sizes.learning_rate},
        },
    }
    path = folder / "bench.yaml"
    path.write_text(json.dumps({"astuner": config}))
    return path


def main(folder: Path) -> None:
    sizes = Sizes.load(folder)
    gate = Gate()
    # The progress bars are the only difference from `astuner --conf`.
    launch.RunProgress = partial(GatedProgress, gate=gate)
    loaded = load_config(configuration(folder, sizes))
    summary = launch.Launcher.from_loaded(loaded, exp_dir=str(folder / "records")).train()
    record = folder / "records" / "bench"
    first = min(read_episode(record / entry.path).metadata["rewarded_at"] for entry in read_index(record))
    gate.finish(first, tokens=summary.tokens.raw, completion_tokens=summary.tokens.trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
