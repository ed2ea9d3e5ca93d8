"""Measure how the calls of episodes are merged into samples: number of samples, exactness and speed.

Prints one line of JSON per workload; `merge_seconds` is the median of several runs.

    python bench/bench_merge.py [--workload FILE.json] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from workloads import BUILT_IN, Workload, calls_of, load

from astuner.context_tracker.audit import certificate, count_tokens
from astuner.context_tracker.merge import build_samples


def measure(name: str, workload: Workload, repeats: int) -> dict[str, Any]:
    """Merge every episode of a workload separately and return the measurements."""
    episodes = calls_of(workload)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        samples = {episode: build_samples(calls) for episode, calls in episodes.items()}
        seconds.append(time.perf_counter() - start)
    counts = count_tokens([call for calls in episodes.values() for call in calls])
    exact = [certificate(calls, samples[episode]) * len(calls) for episode, calls in episodes.items()]
    return {
        "workload": name,
        "calls": len(workload),
        "samples": sum(map(len, samples.values())),
        "raw_tokens": counts.raw,
        "distinct_tokens": counts.distinct,
        "trained_tokens": sum(sum(sample.train_counts) for rows in samples.values() for sample in rows),
        "certificate": sum(exact) / len(workload),
        "merge_seconds": statistics.median(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workload", type=Path, help="a JSON list of calls to use instead of the built-in workloads")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    workloads = (
        {args.workload.stem: load(args.workload)} if args.workload else {n: make() for n, make in BUILT_IN.items()}
    )
    for name, workload in workloads.items():
        print(json.dumps(measure(name, workload, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
