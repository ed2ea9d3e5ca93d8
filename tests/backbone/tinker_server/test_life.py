"""Sessions, futures and limits: nothing is kept for ever, and nobody is shut out by the dead."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from astuner.backbone.tinker_server import sessions as sessions_module
from astuner.backbone.tinker_server.checkpoints import CheckpointStore, Run
from astuner.backbone.tinker_server.futures import (
    KEPT_AFTER_RETRIEVAL_SECONDS,
    KEPT_SECONDS,
    MOST_PENDING,
    Futures,
    Work,
)
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.samplers import SamplerPool
from astuner.backbone.tinker_server.service import Limits
from astuner.backbone.tinker_server.sessions import EXPIRES_SECONDS, SILENT_SECONDS, Sessions
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.backbone.tinker_server.trainee import Trainee
from astuner.backbone.tinker_server.wire import LoraSettings
from astuner.errors import ModelError
from astuner.schema import SamplingParams
from tests.backbone.tinker_server.served import Served, datum, serving, tinker


class Clock:
    """A clock that stands until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(value: Any) -> Work:
    async def work() -> dict[str, Any]:
        return {"value": value}

    return work


async def hang() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {}


async def test_results_wait_for_their_client_for_a_while():
    clock = Clock()
    futures = Futures(clock)
    fetched, waiting = futures.start("s", answer(1)), futures.start("s", answer(2))
    for _ in range(2):  # an answer may be lost on its way
        assert json.loads(await futures.retrieve(fetched, 1) or b"") == {"value": 1}
    await asyncio.sleep(0)
    clock.now = KEPT_AFTER_RETRIEVAL_SECONDS
    futures.sweep()
    with pytest.raises(Refusal, match="is gone") as gone:
        await futures.retrieve(fetched, 1)
    assert gone.value.status == 410
    assert json.loads(await futures.retrieve(waiting, 1) or b"") == {"value": 2}
    left = futures.start("s", answer(3))
    await asyncio.sleep(0.01)
    clock.now += KEPT_SECONDS
    futures.sweep()
    assert len(futures) == 0
    with pytest.raises(Refusal, match="is gone"):
        await futures.retrieve(left, 1)
    with pytest.raises(Refusal, match="is not of this server") as foreign:
        await futures.retrieve("else-1", 1)
    assert foreign.value.status == 404


async def test_what_is_being_computed_is_waited_for_and_not_swept():
    clock = Clock()
    futures = Futures(clock)
    ready = asyncio.Event()

    async def slow() -> dict[str, Any]:
        await ready.wait()
        return {}

    request = futures.start("s", slow)
    assert await futures.retrieve(request, 0.01) is None
    clock.now = 10 * KEPT_SECONDS
    futures.sweep()
    asked = asyncio.create_task(futures.retrieve(request, 5))
    ready.set()
    assert await asked == b"{}"


async def test_the_requests_of_a_session_end_with_it():
    futures = Futures()
    ours, theirs = (futures.start(name, hang) for name in ("ours", "theirs"))  # type: ignore[arg-type]
    asked = asyncio.create_task(futures.retrieve(ours, 5))
    await asyncio.sleep(0)
    futures.drop("ours")
    with pytest.raises(Refusal, match="is gone"):
        await asked
    assert await futures.retrieve(theirs, 0) is None
    futures.close()
    assert len(futures) == 0
    with pytest.raises(Refusal, match="the server is ending"):
        futures.start("s", hang)


async def test_errors_have_their_category(log: list[str]):
    def fails(error: Exception) -> Work:
        async def work() -> dict[str, Any]:
            raise error

        return work

    futures = Futures()
    user = futures.start("s", fails(ModelError("give it differently")))
    server = futures.start("s", fails(ZeroDivisionError("oh")))
    nan = futures.start("s", answer(float("nan")))
    results = [json.loads(await futures.retrieve(one, 1) or b"") for one in (user, server, nan)]
    assert results[0] == {"error": "give it differently", "category": "user"}
    assert results[1] == {"error": "ZeroDivisionError: oh", "category": "server"}
    assert results[2]["category"] == "server"
    assert any("a request failed: oh" in line for line in log)


async def test_there_is_room_for_so_many_requests():
    futures = Futures()
    for _ in range(MOST_PENDING):
        futures.check_room()
        futures.start("s", hang)
    with pytest.raises(Refusal, match="wait for some of them") as refused:
        futures.check_room()
    assert refused.value.status == 429  # of which the client knows that it may send it again later
    futures.close()


def test_silent_sessions():
    clock = Clock()
    sessions = Sessions(clock)
    first, second = sessions.begin(), sessions.begin()
    clock.now = 30
    sessions.heard_of(second.session_id)
    clock.now = SILENT_SECONDS
    assert sessions.silent_for(SILENT_SECONDS) == [first]
    sessions.end(first)
    with pytest.raises(Refusal, match="make a new ServiceClient"):
        sessions.heard_of(first.session_id)


def test_a_session_that_fell_silent_ends_with_all_that_is_its(
    start: StartingModel, tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
):
    with serving(start, tmp_path) as served:
        client = served.client()
        training = client.create_lora_training_client(served.model, rank=2)
        training.save_state("kept").result()
        sampling = training.save_weights_and_get_sampling_client()
        assert len(served.service.store.checkpoints()) == 2
        (session,) = served.service.sessions
        session.seen -= EXPIRES_SECONDS
        served.service.sweep()
        assert len(served.service.models) == len(served.service.futures) == len(list(served.service.sessions)) == 0
        assert [one.name for one in served.service.store.checkpoints()] == ["kept"]
        assert any("was silent for 600 s and is ended" in line for line in log)
        with pytest.raises(tinker.NotFoundError, match="load its last checkpoint into a new one"):
            training.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
        with pytest.raises(tinker.NotFoundError, match="make a new sampling client"):
            sampling.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result()


def test_as_many_models_as_there_is_room_for(start: StartingModel, tmp_path: Path):
    with serving(start, tmp_path, Limits(models=2)) as served:
        first, second = served.client(), served.client()
        first.create_lora_training_client(served.model, rank=0)
        first.create_lora_training_client(served.model, rank=2)
        with pytest.raises(tinker.BadRequestError, match=r"2 models are in training.*--max-models"):
            second.create_lora_training_client(served.model, rank=2)
        # A client that died without a word gives its place up to one that lives.
        session = next(one for one in served.service.sessions if one.session_id == first.holder.get_session_id())
        session.seen -= SILENT_SECONDS
        second.create_lora_training_client(served.model, rank=2)
        assert len(served.service.models) == 1


def test_a_model_that_is_asked_for_again_is_made_once(served: Served, client: Any):
    asked = {"session_id": client.holder.get_session_id(), "model_seq_id": 7, "base_model": served.model}
    before = len(served.service.models)
    first, second = (httpx.post(f"{served.url}/api/v1/create_model", json=asked).json() for _ in range(2))
    assert first == second
    assert len(served.service.models) == before + 1


def test_signs_of_life_keep_a_session(served: Served, client: Any):
    session = served.service.sessions.heard_of(client.holder.get_session_id())
    session.seen = 0.0
    client.create_sampling_client(base_model=served.model)
    assert session.seen > 0
    assert sessions_module.SILENT_SECONDS > 2 * 10  # the client's period


def test_a_server_that_ends_leaves_nothing_of_sessions(start: StartingModel, tmp_path: Path):
    with serving(start, tmp_path) as served:
        training = served.client().create_lora_training_client(served.model, rank=2)
        training.save_weights_and_get_sampling_client()
        kept = training.save_weights_for_sampler("kept").result().path
    with serving(start, tmp_path) as again:
        assert [one.path for one in again.service.store.checkpoints()] == [kept]


async def test_who_goes_away_while_weights_are_changed_leaves_the_engine_to_others(
    start: StartingModel, tmp_path: Path
):
    store = CheckpointStore(tmp_path)
    pool = SamplerPool(start, store, 1)
    lora = LoraSettings(rank=2)
    run = Run("run", "tiny", lora, {}, datetime.now(UTC))
    saved = store.save(run, "sampler_weights", "x", Trainee(start, lora).weights(), None)

    async def sample_from_saved() -> None:
        async with pool.hold(saved):
            raise AssertionError("the engine was in use")

    async with pool.hold(None) as first:
        waiting = asyncio.create_task(sample_from_saved())
        while pool._samplers:  # until it has begun to wait for the only engine
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await first.engine.generate([1], SamplingParams(max_tokens=2))).token_ids
    async with pool.hold(saved) as second, asyncio.timeout(30):
        assert second is first
        assert second.users == 1
    async with pool.hold(None) as third:
        assert third is first
        assert len((await third.engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2
    await asyncio.to_thread(pool.close)
