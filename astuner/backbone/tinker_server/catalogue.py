"""What there is: models, training runs, checkpoints, sessions."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from astuner.backbone.tinker_server import wire
from astuner.backbone.tinker_server.checkpoints import Checkpoint, Run
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.service import TinkerService

_API = "/api/v1"
_GRACE_SECONDS = 60
"""How long deleted weights for samplers stay: a client may have been told of them and not have begun to sample."""


def add_catalogue(app: FastAPI, service: TinkerService) -> None:
    """Add the addresses that say what there is, and those that remove checkpoints."""
    _add_models(app, service)
    _add_runs(app, service)
    _add_checkpoints(app, service)


def _add_models(app: FastAPI, service: TinkerService) -> None:
    @app.post(f"{_API}/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        asked = wire.ModelIdRequest.model_validate_json(await request.body())
        run = service.models.of(asked.model_id).run
        data = {"arch": service.start.architecture, "model_name": run.base_model}
        return {
            "type": "get_info",
            "model_id": run.run_id,
            "model_name": run.base_model,
            "model_data": {**data, "tokenizer_id": service.start.names[0]},
            "is_lora": True,
            "lora_rank": run.lora.rank,
        }

    @app.post(f"{_API}/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        asked = wire.WeightsInfoRequest.model_validate_json(await request.body())
        run = service.store.run(service.store.find(asked.tinker_path).run_id)
        # The client makes a model like it from this alone, and knows adapters only: rank 0 trains all weights.
        return {
            "base_model": run.base_model,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "train_unembed": run.lora.train_unembed,
            "train_mlp": run.lora.train_mlp,
            "train_attn": run.lora.train_attn,
        }

    @app.get(f"{_API}/samplers/{{sampler_id}}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        return service.sampler(sampler_id)


def _add_runs(app: FastAPI, service: TinkerService) -> None:
    def all_runs() -> list[Run]:
        known = {run.run_id: run for run in (*service.store.runs(), *service.models.runs())}
        return sorted(known.values(), key=lambda run: run.created, reverse=True)

    def about(run: Run) -> dict[str, Any]:
        saved = service.store.checkpoints(run.run_id)
        last = {kind: [one for one in saved if one.kind == kind][-1:] for kind in ("weights", "sampler_weights")}
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "last_request_time": (saved[-1].time if saved else run.created).isoformat(),
            "last_checkpoint": _about(last["weights"][0]) if last["weights"] else None,
            "last_sampler_checkpoint": _about(last["sampler_weights"][0]) if last["sampler_weights"] else None,
            "user_metadata": {key: str(value) for key, value in run.metadata.items()},
        }

    @app.get(f"{_API}/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        runs = all_runs()
        shown = [about(run) for run in runs[offset : offset + limit]]
        return {"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}}

    @app.get(f"{_API}/training_runs/{{run_id}}")
    async def training_run(run_id: str) -> dict[str, Any]:
        found = next((run for run in all_runs() if run.run_id == run_id), None)
        return about(found or service.store.run(run_id))

    @app.get(f"{_API}/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": [one.session_id for one in service.sessions][offset : offset + limit]}

    @app.get(f"{_API}/sessions/{{session_id}}")
    async def session(session_id: str) -> dict[str, Any]:
        found = next((one for one in service.sessions if one.session_id == session_id), None)
        if found is None:
            raise Refusal(f"there is no session {session_id!r}", 404)
        return {
            "training_run_ids": [run_id for run_id, _ in found.models.values()],
            "sampler_ids": list(found.samplers),
        }


def _add_checkpoints(app: FastAPI, service: TinkerService) -> None:
    store = service.store

    @app.get(f"{_API}/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = store.checkpoints()[::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": [_about(one) for one in found[offset : offset + limit]], "cursor": cursor}

    @app.get(f"{_API}/training_runs/{{run_id}}/checkpoints")
    async def checkpoints_of(run_id: str) -> dict[str, Any]:
        return {"checkpoints": [_about(one) for one in store.checkpoints(run_id)]}

    @app.put(f"{_API}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}/ttl")
    async def set_ttl(run_id: str, checkpoint_id: str, request: Request) -> Response:
        asked = wire.TtlRequest.model_validate_json(await request.body())
        store.set_ttl(store.find_in(run_id, checkpoint_id), asked.ttl_seconds)
        return Response(status_code=204)

    @app.delete(f"{_API}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}")
    async def delete(run_id: str, checkpoint_id: str) -> Response:
        checkpoint = store.find_in(run_id, checkpoint_id)
        if checkpoint.kind == "weights":
            store.delete(checkpoint)
        else:
            store.set_ttl(checkpoint, _GRACE_SECONDS)
        return Response(status_code=204)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
        "time": checkpoint.time.isoformat(),
        "tinker_path": checkpoint.path,
        "size_bytes": sum(file.stat().st_size for file in checkpoint.folder.iterdir()),
        "public": False,
        "expires_at": checkpoint.expires.isoformat() if checkpoint.expires else None,
    }
