"""Short runs of the benchmark, each in a separate process, and the messages of astuner about them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from astuner import AstunerJob
from astuner.errors import AstunerError
from astuner.run_record import read_findings, read_metrics
from tutorial.example_math_agent.prepare_model import tiny_model

AGENTS = Path(__file__).parent / "agents.py"
CLEAN_AGENTS = Path(__file__).parent / "clean_agents.py"


@dataclass
class Run:
    """The inputs of a run of the local backbone, which a fault may change.

    Attributes:
        folder: an empty folder, for the data, the model and the record.
        keys: keys of section `astuner` of the configuration.
        training, validation: rows of the data.
        patch: called before the run, to change a component of the trainer or the engine; returns nothing.
        model: the model; None for a copy of the tutorial's tiny model.
    """

    folder: Path
    keys: dict[str, Any] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    patch: Callable[[], None] = lambda: None
    model: Path | None = None

    def copy_of_model(self) -> Path:
        """Return the folder of a copy of the tiny model, whose files may be changed."""
        if self.model is None:
            self.model = self.folder / "model"
            shutil.copytree(tiny_model(), self.model)
        return self.model

    def tune(self) -> None:
        """Train."""
        job = AstunerJob(algorithm="grpo", model=str(self.copy_of_model()), experiment_name="run")
        training, validation = self.folder / "train.jsonl", self.folder / "validation.jsonl"
        training.write_text("".join(json.dumps(row) + "\n" for row in self.training))
        validation.write_text("".join(json.dumps(row) + "\n" for row in self.validation))
        job.set_data("file", training, validation_path=validation if self.validation else None)
        job.configure(self.keys)
        self.patch()
        job.tune(self.folder / "records")


def tasks(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return different sums, differences and products of two numbers."""
    rng = random.Random(f"faults {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        left, right, sign = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-*")
        answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
        question = f"What is {left} {sign} {right}?"
        rows.setdefault(question, {"question": question, "answer": str(answer)})
    return list(rows.values())


def math_run(folder: Path, steps: int = 2) -> Run:
    """Return an ordinary run: the math agent with a tool, 4 tasks × 6 episodes a step."""
    rows = tasks(32)
    return Run(
        folder,
        {
            "backbone": "local",
            "model.renderer": "qwen3",
            "rollout.agentscope_workflow": f"{AGENTS}->Math",
            "task_judge.judge_protocol": f"{AGENTS}->Exact",
            "rollout.num_repeat": 6,
            "rollout.temperature": 1.0,
            "rollout.max_response_length_in_one_turn": 48,
            "rollout.max_model_len": 1024,
            "rollout.compute_madness_checklist": [],
            "data.train_batch_size": 4,
            "data.max_prompt_length": 512,
            "data.max_response_length": 512,
            "trainer_common.total_training_steps": steps,
            "trainer_common.mini_batch_num": 1,
            "trainer_common.use_kl_loss": False,
            "trainer_common.test_freq": 1000,
            "trainer_common.save_freq": 1000,
            "trainer_common.val_pass_n": 1,
            "trainer_common.logger": ["console"],
            "trainer_common.optim.lr": 3e-4,
        },
        rows,
        [row for row in tasks(8, seed=1) if row not in rows][:4],
    )


@dataclass(frozen=True)
class Report:
    """What the product said about a run.

    Attributes:
        findings: (step, check, text) of the record: message and fix together.
        error: the message of the error that ended the run; "" if it finished.
        steps: training steps in the record.
    """

    findings: tuple[tuple[int, str, str], ...]
    error: str
    steps: int


def report_of(prepare: Callable[[Path], Run]) -> Report:
    """Prepare and do a run in this process, and return what the product said."""
    with tempfile.TemporaryDirectory(prefix="astuner-fault-") as name, _quiet(), contextlib.chdir(name):
        folder = Path(name)
        error = ""
        try:
            prepare(folder).tune()
        except AstunerError as problem:
            error = str(problem)
        except Exception as problem:
            error = f"internal error: {''.join(traceback.format_exception(problem))}"
        record = folder / "records" / "run"
        findings = tuple((f.step, f.check, f"{f.message}. {f.fix}") for f in read_findings(record))
        rows = read_metrics(record) if (record / "metrics.jsonl").exists() else []
        return Report(findings, error, sum("reward/mean" in row.metrics for row in rows))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the output of the run, which the record has as well."""
    logger.remove()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        yield


def _child(prepare: Callable[[Path], Run], answer: Any) -> None:
    import torch

    torch.set_num_threads(1)
    answer.send(report_of(prepare))
    answer.close()
    sys.stdout.flush()
    os._exit(0)  # threads of abandoned episodes do not hold the process


class Worker:
    """A run in a forked process: what a fault changes there does not outlive it, and imports are done once."""

    def __init__(self, name: str, prepare: Callable[[Path], Run]) -> None:
        self.name = name
        fork = multiprocessing.get_context("fork")
        self._answer, theirs = fork.Pipe(duplex=False)
        self._process = fork.Process(target=_child, args=(prepare, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def waits_on(self) -> Any:
        """An object for `multiprocessing.connection.wait`."""
        return self._answer

    def report(self) -> Report:
        """Return the report; an error if the process died."""
        try:
            report: Report = self._answer.recv()
        except EOFError:
            report = Report((), "the process died", 0)
        self._process.join()
        return report

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def run_all(runs: dict[str, Callable[[Path], Run]], parallel: int, seconds: float) -> Iterator[tuple[str, Report]]:
    """Do runs, a few at a time, and yield their reports; a run that is not done after `seconds` is ended."""
    import time
    from multiprocessing.connection import wait

    left = list(runs.items())
    active: list[tuple[Worker, float]] = []
    while left or active:
        while left and len(active) < parallel:
            name, prepare = left.pop(0)
            active.append((Worker(name, prepare), time.monotonic() + seconds))
        wait([worker.waits_on for worker, _ in active], timeout=1.0)
        still: list[tuple[Worker, float]] = []
        for worker, until in active:
            if worker.waits_on.poll():
                yield worker.name, worker.report()
            elif time.monotonic() > until:
                worker.stop()
                yield worker.name, Report((), f"not done after {seconds:g} s", 0)
            else:
                still.append((worker, until))
        active = still
