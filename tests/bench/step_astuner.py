"""One side of bench_step.py: astuner's local backbone, as `astuner --conf` runs it, stopped between steps."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from step_task import LEARNING_RATE, Gate, Sizes, questions

from astuner.backbone.base import RunContext, load_backbone
from astuner.backbone.progress import Phase, RunProgress
from astuner.config.dumping import to_yaml
from astuner.launcher.console import make_console
from astuner.launcher.launch import Launch
from astuner.run_record import RunRecord


class GatedPhase(Phase):
    """A bar that waits at the gate whenever it has moved on."""

    gate: Gate

    def advance(self, note: str | None = None) -> None:
        super().advance(note)
        self.gate.wait()


class GatedProgress(RunProgress):
    """The bars of a run; that of the training steps waits at the gate before the first step and after each."""

    def __init__(self, console: Console, gate: Gate) -> None:
        super().__init__(console)
        self._gate = gate

    @contextlib.contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Phase]:
        with super().phase(name, total, done) as phase:
            if name == "training":
                self._gate.wait()
                phase.__class__ = GatedPhase
                phase.gate = self._gate
            yield phase


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
    launch = Launch.from_yaml(configuration(folder, sizes), exp_dir=str(folder / "records"))
    config = launch.config.astuner
    # What `Launch.train` does, but for the progress bars.
    with RunRecord.open(
        Path(config.experiment_dir),
        backbone=config.backbone,
        config_yaml=to_yaml(launch.config),
        resume=False,
        loggers=config.trainer_common.logger,
        project=config.project_name,
    ) as record:
        progress = GatedProgress(make_console(), gate)
        context = RunContext(launch.config, launch.config_dir, record, progress, time.time())
        summary = load_backbone(config.backbone).train(context)
    gate.finish(tokens=summary.tokens.raw, completion_tokens=summary.tokens.trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
