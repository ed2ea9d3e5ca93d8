"""Plays many instances of an environment at once, kills the service, and looks for what is left.

`python -m campaigns.env_load [--instances 128] [--steps 5000]` prints the time of a step, and fails if a step is
lost, performed twice or left out, or if an instance or a process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from astuner.env_service.client import EnvServiceClient
from astuner.errors import EnvError
from astuner.schema import EnvTask
from tests.env_service.services import Service, has_ended, serving, wait_until

_TASK = EnvTask("guess", "train", "number-1", {"max_steps": 10**9})


async def play(client: EnvServiceClient, instances: int, steps: int) -> list[float]:
    """Play `steps` steps in all, and return the seconds of each."""
    created = await asyncio.gather(*(client.create(_TASK, seed) for seed in range(instances)))
    seconds: list[float] = []
    shares = [steps // instances + (number < steps % instances) for number in range(instances)]

    async def play_one(number: int) -> None:
        for step in range(shares[number]):
            started = time.perf_counter()
            result = await created[number].step("0")
            seconds.append(time.perf_counter() - started)
            assert result.info["step"] == step + 1, f"step {step + 1} of instance {number} was {result.info['step']}"

    await asyncio.gather(*map(play_one, range(instances)))
    await asyncio.gather(*(asyncio.wrap_future(instance.release()) for instance in created))
    assert len(seconds) == steps
    return seconds


async def play_until_the_service_is_killed(service: Service, client: EnvServiceClient, instances: int) -> int:
    """Return the number of instances that named the end of the service."""
    created = await asyncio.gather(*(client.create(_TASK, seed) for seed in range(instances)))
    service.process.kill()
    results = await asyncio.gather(*(instance.step("0") for instance in created), return_exceptions=True)
    assert all(isinstance(result, EnvError) and service.address.url in str(result) for result in results), results
    return len(results)


def main() -> None:
    """Run the campaign, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), f"--max-instances={arguments.instances}") as service,
    ):
        client = EnvServiceClient(service.address, retry_seconds=10.0)
        before = len(service.processes())
        started = time.perf_counter()
        seconds = asyncio.run(play(client, arguments.instances, arguments.steps))
        total = time.perf_counter() - started
        left = service.instances()
        # One has the lists of tasks.
        wait_until(lambda: len(service.processes()) <= before + 1)
        processes = len(service.processes()) - before
        below = [process.pid for process in service.processes()]
        named = asyncio.run(play_until_the_service_is_killed(service, client, min(arguments.instances, 16)))
        wait_until(lambda: all(map(has_ended, below)))
        client.close()
    result = {
        "instances": arguments.instances,
        "steps": len(seconds),
        "seconds": round(total, 2),
        "step_ms_p50": round(1000 * statistics.median(seconds), 2),
        "step_ms_p95": round(1000 * statistics.quantiles(seconds, n=20)[-1], 2),
        "instances_left": len(left),
        "processes_left": processes - 1,
        "instances_that_named_the_killed_service": named,
    }
    print(json.dumps(result))
    assert not left


if __name__ == "__main__":
    main()
