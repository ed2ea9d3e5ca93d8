"""One side of bench_step.py: astuner's local backbone, as `astuner --conf` runs it, stopped between steps."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from step_task import LEARNING_RATE, Gate, Sizes, questions

from astuner.backbone.progress import Phase, RunProgress
from astuner.config.loading import load_config
from astuner.launcher import launch


class GatedPhase(Phase):
    """A bar that waits at the gate whenever it has moved on."""

    def __init__(self, phase: Phase, gate: Gate) -> None:
        self._phase = phase
        self._gate = gate

    def advance(self, note: str | None = None) -> None:
        self._phase.advance(note)
        self._gate.wait()


class GatedProgress(RunProgress):
    """The bars of a run; that of the training steps waits at the gate before the first step and after each."""

    def __init__(self, console: Console, gate: Gate, **more: bool) -> None:
        super().__init__(console, **more)
        self._gate = gate

    @contextlib.contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Phase]:
        with super().phase(name, total, done) as phase:
            if name != "training":
                yield phase
                return
            self._gate.wait()
            yield GatedPhase(phase, self._gate)


def configuration(folder: Path, sizes: Sizes) -> Path:
    """Write the YAML and the tasks; return the YAML."""
    rows = [json.dumps({"question": question, "answer": ""}) for question in questions(sizes)]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    agent = Path(__file__).with_name("step_agent.py")
    config = {
        "experiment_name": "bench",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
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
            "optim": {"lr": LEARNING_RATE},
        },
    }
    path = folder / "bench.yaml"
    path.write_text(json.dumps({"astuner": config}))
    return path


def main(folder: Path) -> None:
    sizes = Sizes.load(folder)
    gate = Gate()
    # The one thing that is not as in `astuner --conf`: its progress bars are ours.
    launch.RunProgress = partial(GatedProgress, gate=gate)
    loaded = load_config(configuration(folder, sizes))
    summary = launch.Launch.of_loaded(loaded, exp_dir=str(folder / "records")).train()
    gate.finish(tokens=summary.tokens.raw, completion_tokens=summary.tokens.trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
