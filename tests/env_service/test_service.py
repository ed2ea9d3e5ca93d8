"""The environment service over HTTP: tasks, instances, steps, evaluation and release."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from astuner.env_service.client import EnvServiceClient
from astuner.errors import EnvError
from astuner.schema import EnvTask, StepResult, TaskProfile
from tests.env_service.conftest import NewClient
from tests.env_service.services import Service, has_ended, wait_until


async def test_an_episode_from_creation_to_release(service: Service, client: EnvServiceClient, task: EnvTask) -> None:
    instance = await client.create(task, seed=5)
    assert instance.env_type == "guess"
    assert instance.profile.task_id == "number-1"
    assert instance.profile.main_query == "Guess a number from 1 to 20. Answer in the form of text."
    assert instance.profile.metadata == {"high": 20}
    assert instance.profile.max_steps == 8
    assert instance.profile.reference is None
    assert instance.observation.text == "Game 5 begins."
    assert len(instance.observation.legal_actions) == 20
    assert instance.tools[0]["function"]["name"] == "guess"
    wrong = await instance.step("100")
    assert wrong.observation.text == "The number is smaller."
    assert (wrong.reward, wrong.is_done, wrong.is_valid, wrong.info) == (0.0, False, True, {"step": 1})
    assert not (await instance.step("what?")).is_valid
    assert (await instance.evaluate()).score == 0.0
    (profile,) = [each for each in client.tasks(task, with_reference=True) if each.task_id == "number-1"]
    assert profile.reference is not None
    (answer,) = profile.reference.actions
    last = await instance.step({"name": "guess", "arguments": {"number": int(str(answer))}})
    assert (last.reward, last.is_done) == (1.0, True)
    assert instance.observation.text == "Correct."
    assert [step.reward for step in instance.steps] == [0.0, 0.0, 1.0]
    evaluation = await instance.evaluate()
    assert (evaluation.score, evaluation.is_success) == (1.0, True)
    with pytest.raises(EnvError, match="the task has ended"):
        await instance.step("1")
    (listed,) = [each for each in service.instances() if each["instance_id"] == instance.instance_id]
    assert listed["steps"] == 3
    instance.release().result(300)
    assert instance.instance_id not in [each["instance_id"] for each in service.instances()]
    wait_until(lambda: has_ended(int(str(listed["pid"]))))
    with pytest.raises(EnvError, match="was released"):
        await instance.evaluate()


def test_tasks_are_read_in_pages_and_in_order(client: EnvServiceClient) -> None:
    source = EnvTask("guess", "train", params={"high": 7}, action_preference="box")
    for page in (1, 7, 20, 100):
        profiles = client.tasks(source, page=page)
        assert [profile.task_id for profile in profiles] == [f"number-{number}" for number in range(20)]
        assert {profile.main_query for profile in profiles} == {
            "Guess a number from 1 to 7. Answer in the form of box."
        }
        assert all(profile.reference is None for profile in profiles)
    assert len(client.tasks(EnvTask("guess", "validation"))) == 5


async def test_an_environment_describes_itself(client: EnvServiceClient) -> None:
    info = await client.describe(EnvTask("async", "train"))
    assert info.splits == ["train", "validation"]
    assert info.is_async
    assert info.tools[0]["function"]["name"] == "guess"


async def test_rewards_and_scores_by_agent(client: EnvServiceClient) -> None:
    instance = await client.create(EnvTask("seats", "train", "number-0"))
    result = await instance.step("x")
    assert result.reward == {"white": 1.0, "black": -1.0}
    assert result.observation.agent == "black"
    assert (await instance.evaluate()).score == {"white": 1.0, "black": -1.0}


async def test_instances_of_an_async_environment_share_a_process(client: EnvServiceClient, service: Service) -> None:
    instances = await asyncio.gather(*(client.create(EnvTask("async", "train", f"number-{i}")) for i in range(8)))
    results = await asyncio.gather(*(instance.step("pid") for instance in instances))
    assert len({result.observation.text for result in results}) == 1
    # An instance that waits does not delay the others, and is cancelled.
    waiting = asyncio.ensure_future(instances[0].step("sleep"))
    assert (await instances[1].step("x")).is_valid is False
    instances[0].release().result(300)
    with pytest.raises(EnvError, match="released"):
        await waiting
    assert (await instances[2].step("pid")).observation.text == results[0].observation.text


async def test_the_parameters_of_an_environment_reach_its_instances(client: EnvServiceClient) -> None:
    instance = await client.create(EnvTask("guess", "train", "number-1", {"high": 3, "max_steps": 1}, "code"))
    assert instance.profile.main_query == "Guess a number from 1 to 3. Answer in the form of code."
    assert (await instance.step("9")).is_done


def test_a_client_serves_the_event_loops_of_many_threads(client: EnvServiceClient) -> None:
    found: list[StepResult] = []

    async def play(number: int) -> None:
        instance = await client.create(EnvTask("guess", "train", f"number-{number}"))
        found.append(await instance.step("100"))

    threads = [threading.Thread(target=asyncio.run, args=(play(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6


async def test_a_repeated_request_is_performed_once(client: EnvServiceClient, service: Service, task: EnvTask) -> None:
    async with httpx.AsyncClient(base_url=service.address.url, trust_env=False) as http:
        create = {
            "instance_id": "repeated",
            "client_id": client.client_id,
            "env_type": "guess",
            "split": "train",
            "task_id": "number-1",
            "seed": 3,
        }
        answers = await asyncio.gather(*(http.post("/v1/instances", json=create) for _ in range(4)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        assert (await http.post("/v1/instances", json={**create, "seed": 4})).status_code == 409

        async def step(index: int, action: str) -> httpx.Response:
            return await http.post("/v1/instances/repeated/step", json={"index": index, "action": action})

        first = await asyncio.gather(*(step(0, "100") for _ in range(4)))
        assert {answer.json()["info"]["step"] for answer in first} == {1}
        assert (await step(1, "100")).json()["info"]["step"] == 2
        assert (await step(0, "100")).json()["info"]["step"] == 1
        for index, action in ((0, "99"), (3, "100")):
            conflict = await step(index, action)
            assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict")
        for _ in range(2):
            assert (await http.delete("/v1/instances/repeated")).status_code == 204
        late = await http.post("/v1/instances", json=create)
        assert (late.status_code, late.json()["error"]["code"]) == (404, "unknown_instance")


async def test_an_abandoned_creation_leaves_no_instance(new_client: NewClient, service: Service) -> None:
    client = new_client()
    creating = asyncio.ensure_future(client.create(EnvTask("faulty", "train", "number-1", {"fault": "hang"})))
    wait = asyncio.create_task(asyncio.to_thread(wait_until, lambda: _of(client, service)))
    await wait
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not _of(client, service))


async def test_closing_a_client_releases_its_instances(new_client: NewClient, service: Service, task: EnvTask) -> None:
    client, other = new_client(), new_client()
    await asyncio.gather(*(client.create(task) for _ in range(3)), other.create(task))
    await asyncio.to_thread(client.close)
    assert not _of(client, service)
    assert len(_of(other, service)) == 1


def test_openapi_describes_every_route(service: Service) -> None:
    page = httpx.get(f"{service.address.url}/openapi.json", trust_env=False).json()
    assert set(page["paths"]) == {
        "/health",
        "/v1/env_types",
        "/v1/env_type",
        "/v1/tasks",
        "/v1/task",
        "/v1/instances",
        "/v1/instances/{instance_id}",
        "/v1/instances/{instance_id}/step",
        "/v1/instances/{instance_id}/evaluate",
        "/v1/clients/{client_id}",
        "/v1/clients/{client_id}/heartbeat",
    }
    for path in page["paths"].values():
        assert all(operation["description"] for operation in path.values())


def _of(client: EnvServiceClient, service: Service) -> list[Any]:
    return [each for each in service.instances() if each["client_id"] == client.client_id]


def test_a_profile_is_a_task_profile(client: EnvServiceClient, task: EnvTask) -> None:
    assert all(type(profile) is TaskProfile for profile in client.tasks(task))
