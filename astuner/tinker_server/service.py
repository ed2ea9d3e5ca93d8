"""Handles requests: one method per kind of request, without HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.tinker_server import wire
from astuner.tinker_server.base_model import BaseLanguageModel
from astuner.tinker_server.checkpoints import CheckpointStore, TinkerCheckpoint, TrainingRun
from astuner.tinker_server.errors import TinkerRequestError
from astuner.tinker_server.forward_pass import parse_forward_pass, parse_token_ids
from astuner.tinker_server.models import ActiveModel, ModelRegistry
from astuner.tinker_server.sampling import SamplerPool, sample
from astuner.tinker_server.sessions import (
    EVICTION_SECONDS,
    SESSION_TIMEOUT_SECONDS,
    ClientSession,
    Futures,
    Sessions,
    Work,
)
from astuner.tinker_server.trainable_model import TrainableModel


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Attributes:
        models: maximum number of models in training.
        engines: maximum number of sets of weights in memory to sample from.
        snapshots: maximum number of sampler checkpoints per training run.
        body_bytes: maximum size of a request's body.
    """

    models: int = 4
    engines: int = 3
    snapshots: int = 8
    body_bytes: int = 64 * 2**20


class TinkerService:
    """Sessions, models, samplers and checkpoints for one base model. Belongs to one event loop."""

    def __init__(self, base_model: BaseLanguageModel, folder: Path, limits: Limits) -> None:
        self.base_model, self.limits = base_model, limits
        self.store = CheckpointStore(folder)
        self.sessions = Sessions()
        self.futures = Futures()
        self.models = ModelRegistry(base_model)
        self._samplers = SamplerPool(base_model, self.store, limits.engines)
        # Sampler checkpoints by path, with the number of the request that used them last.
        self._last_use: dict[str, int] = {}
        self._use_count = 0

    # Training

    def create_model(self, request: wire.CreateModelRequest) -> dict[str, Any]:
        """Create a model, which starts a training run."""
        session = self.sessions.touch(request.session_id)
        if request.model_seq_id in session.models:  # the client has sent the request again
            model_id, request_id = session.models[request.model_seq_id]
            return {"request_id": request_id, "model_id": model_id}
        self.base_model.check_name(request.base_model)
        self._make_room_for_model()
        model = self.models.add(request, session.policy or TinkerPolicy())

        async def create() -> dict[str, Any]:
            await self.models.create_weights(model)
            return {"type": "create_model", "model_id": model.run.run_id}

        request_id = self.futures.start(session.session_id, create)
        session.models[request.model_seq_id] = (model.run.run_id, request_id)
        return {"request_id": request_id, "model_id": model.run.run_id}

    def _make_room_for_model(self) -> None:
        for session in self.sessions.inactive_for(EVICTION_SECONDS):
            if len(self.models) >= self.limits.models and session.models:
                logger.warning(
                    "session {} was inactive for {:.0f} s; its models are unloaded to make room for another client",
                    session.session_id,
                    EVICTION_SECONDS,
                )
                self._end_session(session)
        if len(self.models) >= self.limits.models:
            raise TinkerRequestError(
                f"{len(self.models)} models are in training, which is the limit; end a client that is done, or "
                "start the server with a higher --max-models"
            )

    def forward(self, request: wire.ForwardRequest) -> dict[str, Any]:
        """Compute log-probabilities and the loss."""
        return self._run_pass(request, request.forward_input, backward=False)

    def forward_backward(self, request: wire.ForwardBackwardRequest) -> dict[str, Any]:
        """Compute log-probabilities and the loss, and accumulate the gradient."""
        return self._run_pass(request, request.forward_backward_input, backward=True)

    def _run_pass(
        self, request: wire.ModelRequest, data: wire.ForwardBackwardInput, *, backward: bool
    ) -> dict[str, Any]:
        forward_pass = parse_forward_pass(data, self.base_model.vocab_size, self.base_model.max_length)
        run = partial(
            TrainableModel.run, forward_pass=forward_pass, backward=backward, check_open=self.models.check_open
        )
        return self._start_computation(request, "forward_backward" if backward else "forward", run)

    def optim_step(self, request: wire.OptimStepRequest) -> dict[str, Any]:
        """Take an optimizer step."""
        return self._start_computation(request, "optim_step", lambda model: model.optim_step(request.adam_params))

    def save_weights(self, request: wire.SaveWeightsRequest) -> dict[str, Any]:
        """Save the weights and the optimizer's state."""
        run = self.models.get(request.model_id).run

        def save(model: TrainableModel) -> dict[str, Any]:
            checkpoint = self.store.save(
                run,
                "weights",
                request.path or f"checkpoint-{uuid.uuid4().hex[:8]}",
                model.weights(),
                model.optimizer_state(),
                ttl_seconds=request.ttl_seconds,
                overwrite=request.overwrite,
            )
            return {"type": "save_weights", "path": checkpoint.path}

        return self._start_computation(request, "save_weights", save)

    def save_weights_for_sampler(self, request: wire.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        """Save weights to sample from. If the request has no name, create a sampling session for them, too."""
        model = self.models.get(request.model_id)
        name = request.path or f"ephemeral-{uuid.uuid4().hex[:8]}"

        def save(trainable: TrainableModel) -> TinkerCheckpoint:
            return self.store.save(
                model.run,
                "sampler_weights",
                name,
                trainable.weights(),
                None,
                digests=trainable.weight_digests(),
                ttl_seconds=request.ttl_seconds,
                ephemeral=request.path is None,
            )

        async def work() -> dict[str, Any]:
            checkpoint = await self.models.compute(model, save)
            self._record_use(checkpoint)
            self._delete_old_snapshots(model)
            if request.path is not None:
                return {"type": "save_weights_for_sampler", "path": checkpoint.path}
            sampler_id = self._add_sampler(self.sessions.touch(model.session_id), checkpoint)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._start_once(request, model, "save_weights_for_sampler", work)

    def load_weights(self, request: wire.LoadWeightsRequest) -> dict[str, Any]:
        """Load a checkpoint, with or without the optimizer's state."""
        checkpoint = self.store.find(request.path)
        if checkpoint.kind != "weights":
            raise TinkerRequestError(
                f"{request.path} is a sampler checkpoint; training needs tinker://RUN/weights/NAME (from save_state)"
            )
        saved, active = self.store.run(checkpoint.run_id), self.models.get(request.model_id)
        if self.sessions.touch(active.session_id).policy is None and not self.store.has(active.run.run_id):
            # The client does not know the extension, so that its new model takes the checkpoint's policy.
            active.run = replace(active.run, policy=saved.policy)
        run = active.run
        settings = [_adapter_settings(saved), _adapter_settings(run)]
        if settings[0] != settings[1]:
            raise TinkerRequestError(
                f"{request.path} has the adapters {settings[0]}, but this model has {settings[1]}; create a model "
                "with the checkpoint's settings"
            )

        def load(model: TrainableModel) -> dict[str, Any]:
            if model.policy != run.policy:
                active.trainable = model = TrainableModel(self.base_model, run.lora, run.policy)
            model.load(checkpoint.weights(), checkpoint.optimizer_state() if request.optimizer else None)
            return {"type": "load_weights", "path": checkpoint.path}

        return self._start_computation(request, "load_weights", load)

    def unload_model(self, model_id: str) -> dict[str, Any]:
        """Free a model's memory."""
        model = self.models.get(model_id)

        async def unload() -> dict[str, Any]:
            self.models.remove(model_id)
            return {"type": "unload_model", "model_id": model_id}

        return {"request_id": self.futures.start(model.session_id, unload), "model_id": model_id}

    def _start_computation(
        self, request: wire.ModelRequest, kind: str, function: Callable[[TrainableModel], dict[str, Any]]
    ) -> dict[str, Any]:
        model = self.models.get(request.model_id)
        return self._start_once(request, model, kind, lambda: self.models.compute(model, function))

    def _start_once(self, request: wire.ModelRequest, model: ActiveModel, kind: str, work: Work) -> dict[str, Any]:
        """Start a request to a model, unless it is an earlier request that the client has sent again."""
        self.sessions.touch(model.session_id)
        request_id = model.earlier_request(request.seq_id, kind)
        if request_id is None:
            self.futures.check_capacity()
            request_id = self.futures.start(model.session_id, work)
            model.remember_request(request.seq_id, kind, request_id)
        return {"request_id": request_id, "model_id": model.run.run_id}

    # Sampling

    def create_sampling_session(self, request: wire.CreateSamplingSessionRequest) -> dict[str, Any]:
        """Create a sampling session for the base model or a checkpoint."""
        session = self.sessions.touch(request.session_id)
        source = self._source(request.model_path, request.base_model)
        return {"type": "create_sampling_session", "sampling_session_id": self._add_sampler(session, source)}

    def sampler_info(self, sampler_id: str) -> dict[str, Any]:
        """Return the base model and checkpoint of a sampling session."""
        _, source = self.sessions.sampler(sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self.base_model.tokenizer_name,
            "model_path": source.path if source else None,
        }

    def sample(self, request: wire.SampleRequest) -> dict[str, Any]:
        """Sample completions of a prompt."""
        self.futures.check_capacity()
        session_id, temperature = "", 1.0
        if request.sampling_session_id is not None:
            session, source = self.sessions.sampler(request.sampling_session_id)
            session_id = session.session_id
            temperature = (session.policy or TinkerPolicy()).temperature
        else:
            source = self._source(request.model_path, request.base_model)
        base_model = self.base_model
        ids = parse_token_ids(request.prompt.ids, "prompt", base_model.vocab_size, base_model.max_length).tolist()
        if source is not None:
            self._record_use(source)

        async def work() -> dict[str, Any]:
            async with self._samplers.acquire(source) as sampler:
                return await sample(base_model, sampler, request, ids, temperature)

        return {"request_id": self.futures.start(session_id, work)}

    def _source(self, path: str | None, base_model: str | None) -> TinkerCheckpoint | None:
        """Return the checkpoint to sample from; None for the base model."""
        if path is not None:
            return self.store.find(path)
        if base_model is None:
            raise TinkerRequestError("the request names nothing to sample from; set model_path or base_model")
        self.base_model.check_name(base_model)
        return None

    def _add_sampler(self, session: ClientSession, source: TinkerCheckpoint | None) -> str:
        sampler_id = f"sampler-{uuid.uuid4().hex}"
        session.samplers[sampler_id] = source
        if source is not None:
            self._record_use(source)
        return sampler_id

    def _record_use(self, checkpoint: TinkerCheckpoint) -> None:
        self._use_count += 1
        self._last_use[checkpoint.path] = self._use_count

    def _delete_old_snapshots(self, model: ActiveModel) -> None:
        """Delete the least recently used sampler checkpoints of a training run beyond the limit."""
        checkpoints = self.store.checkpoints(model.run.run_id)
        snapshots = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "sampler_weights"]
        by_use = sorted(snapshots[:-1], key=lambda item: (self._last_use.get(item.path, 0), item.time))
        for snapshot in by_use[: max(0, len(snapshots) - self.limits.snapshots)]:
            if not self._samplers.is_in_use(snapshot.path):
                level = "DEBUG" if snapshot.ephemeral else "INFO"
                message = "{} is deleted to make room for newer sampler weights (--max-samplers {})"
                logger.log(level, message, snapshot.path, self.limits.snapshots)
                self._delete(snapshot)

    # Lifetime

    def sweep(self) -> None:
        """End inactive sessions, and delete expired results and checkpoints."""
        for session in self.sessions.inactive_for(SESSION_TIMEOUT_SECONDS):
            logger.warning(
                "session {} was inactive for {:.0f} s and is ended", session.session_id, SESSION_TIMEOUT_SECONDS
            )
            self._end_session(session)
        self.futures.sweep()
        for path in self.store.delete_expired():
            logger.info("{} has expired and is deleted", path)
            self._last_use.pop(path, None)

    def _end_session(self, session: ClientSession) -> None:
        self.sessions.end(session)
        self.futures.drop(session.session_id)
        for model_id, _ in session.models.values():
            self.models.remove(model_id)
        for source in session.samplers.values():
            if source is not None and source.ephemeral:
                self._delete(source)

    def _delete(self, checkpoint: TinkerCheckpoint) -> None:
        self.store.delete(checkpoint)
        self._last_use.pop(checkpoint.path, None)

    async def close(self) -> None:
        """Stop everything and end all sessions; pending requests fail."""
        self.futures.close()
        await asyncio.to_thread(self.models.close)
        await asyncio.to_thread(self._samplers.close)
        for session in self.sessions:
            self._end_session(session)


def _adapter_settings(run: TrainingRun) -> dict[str, Any]:
    """Return what the adapters of two runs must have in common for one to load the other's."""
    policy = run.policy.model_dump(exclude={"temperature"}, exclude_defaults=True)
    return run.lora.model_dump(exclude={"seed"}) | (policy if run.lora.rank else {})
