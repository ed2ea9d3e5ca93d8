"""Measure what worker processes cost, compared with episodes one after another in the main thread.

The engine returns a fixed answer at once, so that only the cost of an episode itself is measured. Batches in the main
thread and in processes alternate. Each pair gives a ratio; the median over the pairs is reported. Memory is that of one
worker after its episodes: USS, which the worker alone has, and PSS, which includes its share of common pages.

Prints one line of JSON: milliseconds of an episode, seconds until the first worker is ready (the fork server's imports
included) and until a further one is, and megabytes per worker.

    python bench/bench_isolation.py [--episodes 64] [--workers 4] [--pairs 7]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from astuner import AstunerJob  # noqa: E402
from astuner.backbone.episode_workers.rollout import make_rollout, with_episodes  # noqa: E402
from astuner.backbone.training.run_inputs import RunInputs  # noqa: E402
from astuner.model_tuner.chat_options import CallSettings  # noqa: E402
from astuner.model_tuner.codec import ChatCodec, load_tokenizer  # noqa: E402
from astuner.schema import Task, TaskSet  # noqa: E402
from astuner.task_rollout.active_episodes import ActiveEpisodes  # noqa: E402
from astuner.task_rollout.rollout import BatchRequest, TaskRollout  # noqa: E402
from tests.scripted_engine import ScriptedEngine  # noqa: E402
from tutorial.tiny_tokenizer import build_tokenizer  # noqa: E402

AGENT = Path(__file__).with_name("isolation_agent.py")


def request(episodes: int, step: int) -> BatchRequest:
    tasks = [Task(f"t{i}", f"question {i}") for i in range(episodes)]
    return BatchRequest(tasks, 1, "train", step, 0, CallSettings(max_tokens=8))


@contextmanager
def started_rollout(folder: Path, workers: int) -> Iterator[TaskRollout]:
    """Yield a rollout in worker processes; with 1 worker, one in this thread, as for a debugger."""
    job = AstunerJob(
        algorithm="grpo", model=folder, backbone="debug", model__renderer="qwen3", debug__debug_max_parallel=workers
    )
    config = job.set_workflow(f"{AGENT}->TwoCalls").set_data("file", "unused.jsonl").config.astuner
    tokenizer = load_tokenizer(str(folder))
    inputs = RunInputs(TaskSet((), ()), str(folder), tokenizer, ChatCodec(tokenizer, "qwen3"), (ROOT,))
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=512)
    with (
        with_episodes(config, inputs) as started,
        closing(make_rollout(config, started, engine, ActiveEpisodes())) as rollout,
    ):
        yield rollout


def seconds(rollout: TaskRollout, episodes: int, step: int) -> tuple[float, set[int]]:
    started = time.perf_counter()
    ended = rollout.run(request(episodes, step))
    elapsed = time.perf_counter() - started
    assert all(episode.status == "ok" for episode in ended), ended[0].error
    return elapsed, {int(episode.metadata["pid"]) for episode in ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    rng = random.Random(0)
    texts = [{"messages": [{"role": "user", "content": str(rng.random())}], "tools": None} for _ in range(50)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tokenizer(texts, context=512).save_pretrained(folder)
        with started_rollout(folder, 1) as inline:
            seconds(inline, args.episodes, 0)
            started = time.perf_counter()
            with started_rollout(folder, args.workers) as processes:
                seconds(processes, 1, 0)
                first = time.perf_counter() - started
                further, pids = seconds(processes, args.workers, 0)
                times = [
                    (seconds(inline, args.episodes, step)[0], seconds(processes, args.episodes, step)[0])
                    for step in range(1, args.pairs + 1)
                ]
                memory = [psutil.Process(pid).memory_full_info() for pid in pids]
    inline_ms, process_ms = ([pair[side] / args.episodes * 1000 for pair in times] for side in (0, 1))
    report = {
        "episode_ms_inline": round(statistics.median(inline_ms), 2),
        "episode_ms_process": round(statistics.median(process_ms), 2),
        "ratio_process_to_inline": round(statistics.median(b / a for a, b in times), 2),
        "first_worker_seconds": round(first, 2),
        "further_worker_seconds": round(further / max(args.workers - 1, 1), 2),
        "worker_uss_mb": round(statistics.median(each.uss for each in memory) / 2**20, 1),
        "worker_pss_mb": round(statistics.median(each.pss for each in memory) / 2**20, 1),
        "workers": args.workers,
        "episodes": args.episodes,
        "pairs": args.pairs,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
