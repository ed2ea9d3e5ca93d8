"""Measure how many episodes per second `astuner rescore` reads and judges, with a trivial judge.

The record is written first: GRPO groups of 8, and two calls per episode. Prints one line of JSON: the median over all
runs of the wall time and of the processor time, which does not depend on other programs of the machine.

    python bench/bench_rescore.py [--episodes 4000] [--tokens 200] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from astuner.analysis.rescore.judging import judge_episodes
from astuner.config.data import TaskJudgeConfig
from astuner.run_record import read_index
from astuner.schema import WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from tests.analysis.rescore.records import an_episode, write_run


class Trivial(BaseJudge):
    """Compares the answer."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        right = workflow_output.metadata["final_answer"] == workflow_task.metadata["answer"]
        return float(right), right


def write(folder: Path, episodes: int, tokens: int) -> None:
    steps = {
        step: [
            an_episode(step, f"{step}-{task}", repeat, f"{step}-{task}" if repeat % 3 else "?", 1.0, tokens=tokens)
            for task in range(8)
            for repeat in range(8)
        ]
        for step in range(1, episodes // 64 + 1)
    }
    write_run(folder, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a call's completion")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        write(folder, options.episodes, options.tokens)
        entries = read_index(folder)
        bytes_an_episode = sum((folder / entry.path).stat().st_size for entry in entries) / len(entries)
        walls, processors = [], []
        for _ in range(options.runs):
            wall, processor = time.monotonic(), time.process_time()
            judged = judge_episodes(folder, entries, Trivial(TaskJudgeConfig()), timeout=60.0, jobs=64)
            walls.append(len(judged) / (time.monotonic() - wall))
            processors.append(len(judged) / (time.process_time() - processor))
    report = {
        "episodes_per_second": round(statistics.median(walls)),
        "slowest": round(min(walls)),
        "episodes_per_processor_second": round(statistics.median(processors)),
        "episodes": len(entries),
        "bytes_per_episode": round(bytes_an_episode),
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
