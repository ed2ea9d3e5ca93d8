"""Routes for training and sampling, and for models, training runs, sessions and checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from astuner.backbone.training.tinker_policy import POLICY_EXTENSION, POLICY_HEADER, TinkerPolicy
from astuner.tinker_server import protobuf, wire
from astuner.tinker_server.checkpoints import TinkerCheckpoint, TrainingRun
from astuner.tinker_server.service import TinkerService
from astuner.tinker_server.sessions import Result, server_error
from astuner.tinker_server.wire import TinkerRequestError

API = "/api/v1"
_POLL_SECONDS = 20.0
"""Seconds for which a request waits for a result. The client times out after 45 s."""
_MAX_CHUNK_BYTES = 5_000_000
"""Size above which the client splits the data of a pass; its own default."""
_SAMPLER_DELETION_SECONDS = 60
"""Delay before sampler weights are deleted: a client may have received the path and not sampled yet."""
_WireModel = TypeVar("_WireModel", bound=wire.WireModel)


def add_routes(app: FastAPI, service: TinkerService) -> None:
    """Add the API to the application."""
    _add_client_routes(app, service)
    _add_session_routes(app, service)
    _add_model_routes(app, service)
    _add_info_routes(app, service)
    _add_run_routes(app, service)
    _add_checkpoint_routes(app, service)


def _add_client_routes(app: FastAPI, service: TinkerService) -> None:
    @app.get(f"{API}/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok"}

    @app.post(f"{API}/client/config")
    async def client_config(response: Response) -> dict[str, Any]:
        # The client opens a connection for this request only and does not close it.
        response.headers["Connection"] = "close"
        return {
            "pjwt_auth_enabled": False,
            # The client sends the chunks of a pass in order, which makes gradients deterministic.
            "parallel_fwdbwd_chunks": False,
            "proto_write_fwdbwd": False,  # Clients of 0.20 send JSON.
            "proto_compress_fwdbwd": False,
            # The client splits a batch that would exceed the limit; half of it, because it estimates the size.
            "fwdbwd_max_chunk_bytes_count": min(_MAX_CHUNK_BYTES, service.limits.body_bytes // 2),
            # On this machine, the transport of httpx is fast enough, and it needs no further package.
            "use_pyqwest_transport": False,
        }

    @app.post(f"{API}/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        base_model = service.base_model
        facts = {"max_context_length": base_model.max_length, "trainable": True, "sampleable": True}
        models = [{"model_name": name, **facts} for name in base_model.names]
        return {"supported_models": models, "extensions": [POLICY_EXTENSION]}


def _add_session_routes(app: FastAPI, service: TinkerService) -> None:
    @app.post(f"{API}/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}  # and discarded

    @app.post(f"{API}/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        created = wire.CreateSessionRequest.model_validate_json(await request.body())
        header = request.headers.get(POLICY_HEADER)
        policy = None if header is None else TinkerPolicy.model_validate_json(header)
        session = service.sessions.create(policy, display_name=created.display_name, metadata=created.user_metadata)
        return {"type": "create_session", "session_id": session.session_id}

    @app.post(f"{API}/sessions/{{session_id}}/finish")
    async def finish(session_id: str, request: Request) -> Response:
        wire.FinishRequest.model_validate_json(await request.body())
        service.finish_session(session_id)
        return Response(status_code=204)

    @app.post(f"{API}/session_heartbeat")
    async def session_heartbeat(request: Request) -> dict[str, Any]:
        heartbeat = wire.SessionRequest.model_validate_json(await request.body())
        service.sessions.touch(heartbeat.session_id)
        return {"type": "session_heartbeat"}


def _add_model_routes(app: FastAPI, service: TinkerService) -> None:
    def add(name: str, request_type: type[_WireModel], handler: Callable[[_WireModel], dict[str, Any]]) -> None:
        async def handle(request: Request) -> dict[str, Any]:
            return handler(request_type.model_validate_json(await request.body()))

        app.post(f"{API}/{name}", name=name)(handle)

    add("create_model", wire.CreateModelRequest, service.create_model)
    add("forward", wire.ForwardRequest, service.run_pass)
    add("optim_step", wire.OptimStepRequest, service.optim_step)
    add("save_weights", wire.SaveWeightsRequest, service.save_weights)
    add("save_weights_for_sampler", wire.SaveWeightsForSamplerRequest, service.save_weights_for_sampler)
    add("load_weights", wire.LoadWeightsRequest, service.load_weights)
    add("unload_model", wire.ModelIdRequest, lambda request: service.unload_model(request.model_id))
    add("create_sampling_session", wire.CreateSamplingSessionRequest, service.create_sampling_session)
    add("asample", wire.SampleRequest, service.sample)

    @app.post(f"{API}/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        body = await request.body()
        if request.headers.get("content-type") == protobuf.MEDIA_TYPE:
            return service.run_pass(protobuf.parse_forward_backward(body), as_protobuf=True)
        return service.run_pass(wire.ForwardBackwardRequest.model_validate_json(body))

    @app.post(f"{API}/cancel_future")
    async def cancel_future(request: Request) -> Response:
        service.futures.cancel(wire.RequestIdRequest.model_validate_json(await request.body()).request_id)
        return Response(status_code=204)

    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = wire.RetrieveRequest.model_validate_json(await request.body()).request_id
        result = await service.futures.retrieve(request_id, _POLL_SECONDS)
        if result is None:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return Response(json.dumps(pending), 408, media_type="application/json")
        accepts_protobuf = protobuf.MEDIA_TYPE in request.headers.get("accept", "")
        return await asyncio.to_thread(result_response, result, accepts_protobuf=accepts_protobuf)


def result_response(result: Result, *, accepts_protobuf: bool) -> Response:
    """Return the response with a request's result; as protobuf, if it has samples and the client accepts it."""
    if isinstance(result, bytes):
        return Response(result, media_type=protobuf.MEDIA_TYPE)
    try:
        if accepts_protobuf and "sequences" in result:
            return Response(protobuf.encode_samples(result), media_type=protobuf.MEDIA_TYPE)
        content = json.dumps(result, allow_nan=False)
    except ValueError as error:  # numbers that are not finite
        content = json.dumps(server_error(error))
    return Response(content, media_type="application/json")


def _add_info_routes(app: FastAPI, service: TinkerService) -> None:
    @app.post(f"{API}/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        model_id = wire.ModelIdRequest.model_validate_json(await request.body()).model_id
        run = service.models.get(model_id).run
        data = {"arch": service.base_model.architecture, "model_name": run.base_model}
        return {
            "type": "get_info",
            "model_id": run.run_id,
            "model_name": run.base_model,
            "model_data": {**data, "tokenizer_id": service.base_model.names[0]},
            "is_lora": True,
            "lora_rank": run.lora.rank,
        }

    @app.post(f"{API}/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        path = wire.WeightsInfoRequest.model_validate_json(await request.body()).tinker_path
        run = service.store.run(service.store.find(path).run_id)
        # The client creates a matching model from this response. It supports only LoRA; rank 0 trains all weights.
        return {
            "base_model": run.base_model,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "train_unembed": run.lora.train_unembed,
            "train_mlp": run.lora.train_mlp,
            "train_attn": run.lora.train_attn,
        }

    @app.get(f"{API}/samplers/{{sampler_id}}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        return service.sampler_info(sampler_id)


def _add_run_routes(app: FastAPI, service: TinkerService) -> None:
    def all_runs() -> list[TrainingRun]:
        runs = {run.run_id: run for run in (*service.store.runs(), *service.models.runs())}
        return sorted(runs.values(), key=lambda run: run.created, reverse=True)

    def run_info(run: TrainingRun) -> dict[str, Any]:
        checkpoints = _named(service.store.checkpoints(run.run_id))
        last = {checkpoint.kind: _checkpoint_info(checkpoint) for checkpoint in checkpoints}
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "last_request_time": (checkpoints[-1].time if checkpoints else run.created).isoformat(),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": {key: str(value) for key, value in run.metadata.items()},
        }

    @app.get(f"{API}/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        runs = all_runs()
        page = [run_info(run) for run in runs[offset : offset + limit]]
        return {"training_runs": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}}

    @app.get(f"{API}/training_runs/{{run_id}}")
    async def training_run(run_id: str) -> dict[str, Any]:
        run = next((run for run in all_runs() if run.run_id == run_id), None)
        return run_info(run or service.store.run(run_id))

    @app.get(f"{API}/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": [session.session_id for session in service.sessions][offset : offset + limit]}

    @app.get(f"{API}/sessions/{{session_id}}")
    async def session(session_id: str) -> dict[str, Any]:
        match = next((session for session in service.sessions if session.session_id == session_id), None)
        if match is None:
            raise TinkerRequestError(f"there is no session {session_id!r}", 404)
        return {
            "training_run_ids": [run_id for run_id, _ in match.models.values()],
            "sampler_ids": list(match.samplers),
            "user_metadata": {key: str(value) for key, value in match.metadata.items()},
            "display_name": match.display_name,
        }


def _add_checkpoint_routes(app: FastAPI, service: TinkerService) -> None:
    store = service.store

    @app.get(f"{API}/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        newest_first = _named(store.checkpoints())[::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(newest_first)}
        page = [_checkpoint_info(checkpoint) for checkpoint in newest_first[offset : offset + limit]]
        return {"checkpoints": page, "cursor": cursor}

    @app.get(f"{API}/training_runs/{{run_id}}/checkpoints")
    async def run_checkpoints(run_id: str) -> dict[str, Any]:
        return {"checkpoints": [_checkpoint_info(checkpoint) for checkpoint in _named(store.checkpoints(run_id))]}

    @app.put(f"{API}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/ttl")
    async def set_ttl(run_id: str, checkpoint_id: str, request: Request) -> Response:
        ttl_seconds = wire.TtlRequest.model_validate_json(await request.body()).ttl_seconds
        store.set_ttl(store.find_in(run_id, checkpoint_id), ttl_seconds)
        return Response(status_code=204)

    @app.delete(f"{API}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}")
    async def delete(run_id: str, checkpoint_id: str) -> Response:
        checkpoint = store.find_in(run_id, checkpoint_id)
        if checkpoint.kind == "weights":
            store.delete(checkpoint)
        else:
            store.set_ttl(checkpoint, _SAMPLER_DELETION_SECONDS)
        return Response(status_code=204)


def _named(checkpoints: list[TinkerCheckpoint]) -> list[TinkerCheckpoint]:
    """Return the checkpoints with a name; the others belong to one client."""
    return [checkpoint for checkpoint in checkpoints if not checkpoint.ephemeral]


def _checkpoint_info(checkpoint: TinkerCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
        "time": checkpoint.time.isoformat(),
        "tinker_path": checkpoint.path,
        "size_bytes": sum(file.stat().st_size for file in checkpoint.folder.iterdir()),
        "public": False,
        "user_metadata": dict(checkpoint.metadata) or None,
        "expires_at": checkpoint.expires.isoformat() if checkpoint.expires else None,
    }
