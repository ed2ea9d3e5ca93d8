"""Routes for information on models, training runs, sessions and checkpoints, and for deleting checkpoints."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from astuner.tinker_server import wire
from astuner.tinker_server.checkpoints import TinkerCheckpoint, TrainingRun
from astuner.tinker_server.errors import TinkerRequestError
from astuner.tinker_server.service import TinkerService

API = "/api/v1"
_SAMPLER_DELETION_SECONDS = 60
"""Delay before sampler weights are deleted: a client may have received the path and not sampled yet."""


def add_rest_routes(app: FastAPI, service: TinkerService) -> None:
    """Add the REST routes for models, training runs, checkpoints and sessions to the application."""
    _add_model_routes(app, service)
    _add_run_routes(app, service)
    _add_checkpoint_routes(app, service)


def _add_model_routes(app: FastAPI, service: TinkerService) -> None:
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
