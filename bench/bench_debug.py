"""Measure the time from process start to the first judged episode, with `--backbone=debug` on the tiny math agent.

The starting model is created first if it is not in the cache. The time includes imports. A first, uncounted run warms
the bytecode cache and the file cache of the operating system. The measurement ends with the earliest end of an episode
that has a reward, judge included. (`first_reward_seconds` of summary.json also starts with the process, but some
systems report the start of a process with a resolution of one second.)

Prints one line of JSON: the median over all runs, in seconds.

    python bench/bench_debug.py [--runs 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from astuner.run_record import read_episode, read_index

ROOT = Path(__file__).resolve().parents[1]
CONF = "tutorial/example_math_agent/math_agent_tiny.yaml"
RECORD = "math_agent_tiny-debug"


def seconds_to_first_reward() -> float:
    """Run the command in a new process and return the seconds until its first episode had a reward."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "astuner", "--conf", CONF, "--backbone=debug", "--exp-dir", folder]
        started = time.time()
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stderr=subprocess.DEVNULL)
        record = Path(folder) / RECORD
        episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    return min(episode.end_time for episode in episodes if episode.reward is not None) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    seconds_to_first_reward()
    measured = [seconds_to_first_reward() for _ in range(runs)]
    report = {
        "first_judged_episode_seconds": round(statistics.median(measured), 3),
        "fastest": round(min(measured), 3),
        "slowest": round(max(measured), 3),
        "runs": runs,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
