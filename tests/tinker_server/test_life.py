"""Lifetimes and limits of sessions, futures and models."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.errors import ModelError
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.schema import SamplingParams
from astuner.tinker_server.checkpoints import CheckpointStore, TrainingRun
from astuner.tinker_server.routes import result_response
from astuner.tinker_server.sampling import SamplerPool
from astuner.tinker_server.service import Limits
from astuner.tinker_server.sessions import (
    EVICTION_SECONDS,
    MAX_PENDING_REQUESTS,
    RESULT_TTL_SECONDS,
    RETRIEVED_RESULT_TTL_SECONDS,
    SESSION_TIMEOUT_SECONDS,
    Futures,
    Sessions,
    Work,
)
from astuner.tinker_server.trainable_model import BaseLanguageModel, TrainableModel
from astuner.tinker_server.wire import LoraSettings, TinkerRequestError
from tests.tinker_server.served import Served, datum, serving, tinker


class Clock:
    """A clock that is set by hand."""

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


async def test_results_are_kept_for_a_while():
    clock = Clock()
    futures = Futures(clock)
    fetched, waiting = futures.start("s", answer(1)), futures.start("s", answer(2))
    for _ in range(2):  # the response may be lost
        assert await futures.retrieve(fetched, 1) == {"value": 1}
    await asyncio.sleep(0)
    clock.now = RETRIEVED_RESULT_TTL_SECONDS
    futures.sweep()
    with pytest.raises(TinkerRequestError, match="was dropped") as dropped:
        await futures.retrieve(fetched, 1)
    assert dropped.value.status == 410
    assert await futures.retrieve(waiting, 1) == {"value": 2}
    unread = futures.start("s", answer(3))
    await asyncio.sleep(0.01)
    clock.now += RESULT_TTL_SECONDS
    futures.sweep()
    assert len(futures) == 0
    with pytest.raises(TinkerRequestError, match="was dropped"):
        await futures.retrieve(unread, 1)
    with pytest.raises(TinkerRequestError, match="there is no request") as foreign:
        await futures.retrieve("else-1", 1)
    assert foreign.value.status == 404


async def test_pending_result_is_awaited_and_not_swept():
    clock = Clock()
    futures = Futures(clock)
    ready = asyncio.Event()

    async def slow() -> dict[str, Any]:
        await ready.wait()
        return {}

    request = futures.start("s", slow)
    assert await futures.retrieve(request, 0.01) is None
    clock.now = 10 * RESULT_TTL_SECONDS
    futures.sweep()
    retrieval = asyncio.create_task(futures.retrieve(request, 5))
    ready.set()
    assert await retrieval == {}


async def test_requests_end_with_their_session():
    futures = Futures()
    first, second = (futures.start(name, hang) for name in ("first", "second"))  # type: ignore[arg-type]
    retrieval = asyncio.create_task(futures.retrieve(first, 5))
    await asyncio.sleep(0)
    futures.drop("first")
    with pytest.raises(TinkerRequestError, match="was dropped"):
        await retrieval
    assert await futures.retrieve(second, 0) is None
    futures.close()
    assert len(futures) == 0
    with pytest.raises(TinkerRequestError, match="the server is shutting down"):
        futures.start("s", hang)


async def test_error_categories(log: list[str]):
    def fails(error: Exception) -> Work:
        async def work() -> dict[str, Any]:
            raise error

        return work

    futures = Futures()
    user = futures.start("s", fails(ModelError("give it differently")))
    server = futures.start("s", fails(ZeroDivisionError("oh")))
    assert await futures.retrieve(user, 1) == {"error": "give it differently", "category": "user"}
    assert await futures.retrieve(server, 1) == {"error": "ZeroDivisionError: oh", "category": "server"}
    assert any("a request failed: oh" in line for line in log)


@pytest.mark.parametrize("accepts_protobuf", [False, True])
def test_results_that_are_not_finite_are_errors(accepts_protobuf: bool):
    sequence = {"stop_reason": "stop", "tokens": [1], "logprobs": [float("nan")]}
    response = result_response({"type": "sample", "sequences": [sequence]}, accepts_protobuf=accepts_protobuf)
    assert response.media_type == "application/json"
    assert json.loads(bytes(response.body))["category"] == "server"


async def test_number_of_pending_requests_is_limited():
    futures = Futures()
    for _ in range(MAX_PENDING_REQUESTS):
        futures.check_capacity()
        futures.start("s", hang)
    with pytest.raises(TinkerRequestError, match="wait until some are done") as raised:
        futures.check_capacity()
    assert raised.value.status == 429  # on which the client retries
    futures.close()


def test_inactive_sessions():
    clock = Clock()
    sessions = Sessions(clock)
    first, second = sessions.create(), sessions.create()
    clock.now = 30
    sessions.touch(second.session_id)
    clock.now = EVICTION_SECONDS
    assert sessions.inactive_for(EVICTION_SECONDS) == [first]
    sessions.end(first)
    with pytest.raises(TinkerRequestError, match="create a new ServiceClient"):
        sessions.touch(first.session_id)


def test_inactive_session_is_ended_with_its_models_and_samplers(
    base_model: BaseLanguageModel, tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
):
    with serving(base_model, tmp_path) as served:
        client = served.client()
        training = client.create_lora_training_client(served.model, rank=2).result()
        training.save_state("permanent").result()
        sampling = training.save_weights_and_get_sampling_client().result()
        assert len(served.service.store.checkpoints()) == 2
        (session,) = served.service.sessions
        session.last_seen -= SESSION_TIMEOUT_SECONDS
        served.service.sweep()
        assert len(served.service.models) == len(served.service.futures) == len(list(served.service.sessions)) == 0
        assert [checkpoint.name for checkpoint in served.service.store.checkpoints()] == ["permanent"]
        assert any("was inactive for 600 s and is ended" in line for line in log)
        with pytest.raises(tinker.NotFoundError, match="load its last checkpoint into a new model"):
            training.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
        with pytest.raises(tinker.NotFoundError, match="create a new sampling client"):
            sampling.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result()


def test_number_of_models_is_limited(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path, Limits(models=2)) as served:
        first, second = served.client(), served.client()
        first.create_lora_training_client(served.model, rank=0).result()
        first.create_lora_training_client(served.model, rank=2).result()
        with pytest.raises(tinker.BadRequestError, match=r"2 models are in training.*--max-models"):
            second.create_lora_training_client(served.model, rank=2).result()
        # An inactive client's models are unloaded for an active client.
        session = next(item for item in served.service.sessions if item.session_id == first.holder.get_session_id())
        session.last_seen -= EVICTION_SECONDS
        second.create_lora_training_client(served.model, rank=2).result()
        assert len(served.service.models) == 1


def test_repeated_create_request_creates_one_model(served: Served, client: Any):
    request = {"session_id": client.holder.get_session_id(), "model_seq_id": 7, "base_model": served.model}
    before = len(served.service.models)
    first, second = (httpx.post(f"{served.url}/api/v1/create_model", json=request).json() for _ in range(2))
    assert first == second
    assert len(served.service.models) == before + 1


def test_requests_keep_a_session_alive(served: Served, client: Any):
    session = served.service.sessions.touch(client.holder.get_session_id())
    session.last_seen = 0.0
    client.create_sampling_client(base_model=served.model).result()
    assert session.last_seen > 0
    assert EVICTION_SECONDS > 2 * 10  # the client's heartbeat interval


def test_server_shutdown_deletes_ephemeral_checkpoints(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path) as served:
        training = served.client().create_lora_training_client(served.model, rank=2).result()
        training.save_weights_and_get_sampling_client().result()
        permanent = training.save_weights_for_sampler("permanent").result().path
    with serving(base_model, tmp_path) as again:
        assert [checkpoint.path for checkpoint in again.service.store.checkpoints()] == [permanent]


async def test_a_sampler_that_keeps_old_weights_is_not_used(
    base_model: BaseLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, lora, policy = CheckpointStore(tmp_path), LoraSettings(rank=2), TinkerPolicy()
    weights = {name: value + 1.0 for name, value in TrainableModel(base_model, lora, policy).weights().items()}
    saved = store.save(
        TrainingRun("run", "tiny", lora, policy, {}, datetime.now(UTC)), "sampler_weights", "x", weights, None
    )
    monkeypatch.setattr(FastForward, "load", lambda forward, weights: None)
    pool = SamplerPool(base_model, store, 1)
    with pytest.raises(
        ModelError, match=r"does not have the trainer's weights: 15 of .* differ \(model\.layers.*_proj\.weight"
    ):
        async with pool.acquire(saved):
            raise AssertionError("a sampler with other weights was used")
    await asyncio.to_thread(pool.close)


async def test_request_cancelled_during_loading_releases_the_sampler(base_model: BaseLanguageModel, tmp_path: Path):
    store = CheckpointStore(tmp_path)
    pool = SamplerPool(base_model, store, 1)
    lora, policy = LoraSettings(rank=2), TinkerPolicy()
    run = TrainingRun("run", "tiny", lora, policy, {}, datetime.now(UTC))
    saved = store.save(run, "sampler_weights", "x", TrainableModel(base_model, lora, policy).weights(), None)

    async def sample_from_saved() -> None:
        async with pool.acquire(saved):
            raise AssertionError("the engine was in use")

    async with pool.acquire(None) as first:
        waiting = asyncio.create_task(sample_from_saved())
        while pool._samplers:  # until it waits for the only sampler
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await first.engine.generate([1], SamplingParams(max_tokens=2))).token_ids
    async with pool.acquire(saved) as second, asyncio.timeout(30):
        assert second is first
        assert second.users == 1
    async with pool.acquire(None) as third:
        assert third is first
        assert len((await third.engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2
    await asyncio.to_thread(pool.close)
