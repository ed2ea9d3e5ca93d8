"""Steps per second through the environment service beside the same environment called directly.

`python bench/bench_env.py [--steps N]` prints a line per number of instances, and at the end one line of JSON.
The measurements of the service and of direct calls alternate; the medians of the rounds are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from astuner.env_service.client import EnvServiceClient  # noqa: E402
from astuner.schema import EnvTask  # noqa: E402
from tests.env_service.environments import GuessNumber  # noqa: E402
from tests.env_service.services import Service, serving  # noqa: E402

_LONG = 10**9
_ROUNDS = 5
_TASK = EnvTask("guess", "train", "number-1", {"max_steps": _LONG})


def direct(steps: int) -> list[float]:
    """Return the seconds of each step of an environment in this process."""
    environment = GuessNumber(max_steps=_LONG)
    environment.reset("train", "number-1", 0)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        environment.step("0")
        seconds.append(time.perf_counter() - started)
    return seconds


async def served(client: EnvServiceClient, instances: int, steps: int) -> tuple[list[float], float]:
    """Return the seconds of each step of concurrent instances in the service, and the seconds of all of them."""
    created = await asyncio.gather(*(client.create(_TASK) for _ in range(instances)))
    seconds: list[float] = []

    async def play(instance: Any) -> None:
        for _ in range(steps):
            started = time.perf_counter()
            await instance.step("0")
            seconds.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*map(play, created))
    total = time.perf_counter() - started
    await asyncio.gather(*(asyncio.wrap_future(instance.release()) for instance in created))
    return seconds, total


def measure(service: Service, instances: int, steps: int) -> dict[str, float]:
    """Return the medians of the rounds for a number of instances."""
    client = EnvServiceClient(service.address)
    each = max(5, steps // instances)
    rows = []
    for _ in range(_ROUNDS):
        alone = direct(each)
        seconds, total = asyncio.run(served(client, instances, each))
        overhead = statistics.median(seconds) - statistics.median(alone)
        rows.append((len(seconds) / total, each / sum(alone), overhead * 1000))
    client.close()
    leaked = len(service.instances())
    rate, rate_alone, overhead = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "instances": instances,
        "steps_per_second": round(rate, 1),
        "direct_steps_per_second": round(rate_alone, 1),
        "overhead_p50_ms": round(overhead, 3),
        "leaked": leaked,
    }


def main() -> None:
    """Measure 1, 16 and 128 instances."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of all instances in a round")
    steps = parser.parse_args().steps
    rows = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as service:
        for instances in (1, 16, 128):
            rows.append(measure(service, instances, steps))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"bench": "env", "overhead_p50_ms": rows[0]["overhead_p50_ms"], "rows": rows}))


if __name__ == "__main__":
    main()
