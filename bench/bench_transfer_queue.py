"""Measure the storage of a step's rows in TransferQueue, as the main process of a run on verl uses it.

The queue is a real one, in a Ray of this machine, with the settings of a run. Each of `--rows` rows has `--tokens`
tokens, of which the last quarter is sampled. The rows are stored, then a further field of each row. One field of all
rows is read and compared with the values stored, and the rows are deleted. The benchmark needs the environment of verl.

The last line is JSON: the number of rows, and the seconds of each of the four steps.

    ENVIRONMENT/bin/python bench/bench_transfer_queue.py [--rows 10000] [--tokens 32]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
import transfer_queue as tq

from astuner.backbone.verl.batch_layout import sample_fields, scored_sample
from astuner.backbone.verl.cluster import verl_worker_server
from astuner.backbone.verl.rules import VerlRunFacts
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.backbone.verl.trainer_config import compose_verl_config
from astuner.config.loading import with_values
from astuner.config.root import RunConfig


@contextmanager
def transfer_queue() -> Iterator[None]:
    """Start Ray and TransferQueue for the block."""
    facts = VerlRunFacts(
        device="cpu",
        rollout_engine="embedded",
        model_path="model",
        checkpoint_folder=Path("checkpoints"),
        total_steps=1,
        n_val=0,
        flash_attention=False,
        gpus=0,
    )
    settings = compose_verl_config(with_values(RunConfig(), {"astuner.backbone": "verl"}), facts).transfer_queue
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with (
        tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder,  # paths of sockets are limited
        verl_worker_server({}) as server,
    ):
        ray.init(
            num_cpus=4,
            num_gpus=1,  # declared; the storage is on nodes with GPUs
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
            runtime_env={"py_executable": server.executable},
        )
        try:
            tq.init(settings)
            yield
            tq.close()
        finally:
            ray.shutdown()


def measure(rows: int, tokens: int) -> dict[str, float]:
    """Store, read and delete rows, and return the seconds of each step."""
    trainer = VerlTrainer.__new__(VerlTrainer)  # no workers
    keys = [f"row-{number}" for number in range(rows)]
    sampled = tokens // 4
    row = sample_fields(scored_sample(range(tokens), tokens - sampled))
    advantages = torch.arange(rows * sampled, dtype=torch.float32).view(rows, sampled)
    seconds = {}
    started = time.perf_counter()
    trainer.put(keys, (row for _ in keys))
    seconds["store_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    trainer.put(keys, ({"advantages": values} for values in advantages))
    seconds["add_field_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    stored = trainer.get(keys, ["advantages"])["advantages"]
    seconds["read_seconds"] = time.perf_counter() - started
    if not torch.equal(torch.stack(list(stored.unbind())), advantages):
        raise RuntimeError("the values that TransferQueue returned differ from those stored")
    started = time.perf_counter()
    trainer.clear(keys)
    seconds["delete_seconds"] = time.perf_counter() - started
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    with transfer_queue():
        seconds = measure(arguments.rows, arguments.tokens)
    print(json.dumps({"rows": arguments.rows, **{name: round(value, 2) for name, value in seconds.items()}}))


if __name__ == "__main__":
    main()
