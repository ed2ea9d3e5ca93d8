"""Many instances at once. `python bench/bench_env.py --steps 5000` has 128 instances and 5,000 steps."""

from __future__ import annotations

import asyncio

from astuner.env_service.client import EnvServiceClient
from astuner.schema import EnvTask
from tests.env_service.services import Service, wait_until


async def test_many_instances_play_at_once_and_none_is_left(client: EnvServiceClient, service: Service) -> None:
    before = len(service.processes())

    async def play(number: int) -> list[int]:
        instance = await client.create(EnvTask("guess", "train", f"number-{number % 20}", {"max_steps": 100}))
        steps = [int((await instance.step("0")).info["step"]) for _ in range(6)]
        await asyncio.wrap_future(instance.release())
        return steps

    assert await asyncio.gather(*map(play, range(32))) == [[1, 2, 3, 4, 5, 6]] * 32
    of_client = [each for each in service.instances() if each["client_id"] == client.client_id]
    assert not of_client
    # One more has the lists of tasks of these parameters.
    wait_until(lambda: len(service.processes()) <= before + 1)
