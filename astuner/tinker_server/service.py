"""Handles requests: one method per kind of request, without HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.tinker_server import protobuf, wire
from astuner.tinker_server.checkpoints import CheckpointStore, TinkerCheckpoint, check_adapters
from astuner.tinker_server.forward_pass import LOSSES, STABLE_REINFORCE, parse_forward_pass, parse_token_ids
from astuner.tinker_server.prompt_scores import check_scores
from astuner.tinker_server.sampling import SamplerCheckpoints, SamplerPool, sample
from astuner.tinker_server.sessions import (
    EVICTION_SECONDS,
    SESSION_TIMEOUT_SECONDS,
    ActiveModel,
    ClientSession,
    Futures,
    ModelRegistry,
    Result,
    Sessions,
    Work,
)
from astuner.tinker_server.trainable_model import BaseLanguageModel, TrainableModel
from astuner.tinker_server.wire import TinkerRequestError


@dataclass(frozen=True)
class Limits:
    """The greatest numbers: models in training, weight sets in memory, sampler checkpoints per run, bytes of a body."""

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
        self._snapshots = SamplerCheckpoints(self.store, self._samplers, limits.snapshots)

    # Training

    def create_model(self, request: wire.CreateModelRequest) -> dict[str, Any]:
        """Create a model, which starts a training run."""
        session = self.sessions.touch(request.session_id)
        lora, policy = request.lora_config or wire.LoraSettings(rank=0), session.policy or TinkerPolicy()

        async def create(model: ActiveModel) -> dict[str, Any]:
            await self.models.create_weights(model)
            return {"type": "create_model", "model_id": model.run.run_id}

        return self._start_model(session, request, request.base_model, lora, policy, create)

    def _start_model(
        self,
        session: ClientSession,
        request: wire.CreateModelRequest | wire.LoadWeightsRequest,
        base_model: str,
        lora: wire.LoraSettings,
        policy: TinkerPolicy,
        create: Callable[[ActiveModel], Awaitable[Result]],
    ) -> dict[str, Any]:
        """Add a model and start the creation of its weights, unless the client has sent the request again."""
        number = request.model_seq_id
        assert number is not None  # checked by the request's type
        if number not in session.models:
            self.base_model.check_name(base_model)
            self._make_room_for_model()
            model = self.models.add(session.session_id, number, base_model, lora, policy, request.user_metadata or {})
            request_id = self.futures.start(session.session_id, partial(create, model))
            session.models[number] = (model.run.run_id, request_id)
        model_id, request_id = session.models[number]
        return {"request_id": request_id, "model_id": model_id}

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

    def run_pass(
        self, request: wire.ForwardRequest | wire.ForwardBackwardRequest, *, as_protobuf: bool = False
    ) -> dict[str, Any]:
        """Compute log-probabilities and the loss; for a ForwardBackwardRequest, accumulate the gradient, too."""
        if backward := isinstance(request, wire.ForwardBackwardRequest):
            data = request.forward_backward_input
        else:
            data = request.forward_input
        forward_pass = parse_forward_pass(data, self.base_model.vocab_size, self.base_model.max_length)

        def run(model: TrainableModel) -> Result:
            output = model.run(forward_pass, backward=backward, check_open=self.models.check_open)
            return protobuf.encode_forward_backward(output) if as_protobuf else output

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
                request.path,
                model.weights(),
                model.optimizer_state(),
                ttl_seconds=request.ttl_seconds,
                overwrite=request.overwrite,
                metadata=request.user_metadata,
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
                metadata=request.user_metadata,
            )

        async def work() -> dict[str, Any]:
            checkpoint = await self.models.compute(model, save)
            self._snapshots.record_use(checkpoint)
            self._snapshots.delete_old(model.run.run_id)
            if request.path is not None:
                return {"type": "save_weights_for_sampler", "path": checkpoint.path}
            session = self.sessions.touch(model.session_id)
            sampler_id = self._add_sampler(session, checkpoint)
            if request.kind == "inflight":
                followers = session.inflight.setdefault(model.run.run_id, [])
                followers.append(sampler_id)
                session.samplers.update(dict.fromkeys(followers, checkpoint))
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._start_once(request.seq_id, model, "save_weights_for_sampler", work)

    def load_weights(self, request: wire.LoadWeightsRequest) -> dict[str, Any]:
        """Load a checkpoint, with or without the optimizer's state, into a model or into a new one."""
        checkpoint = self.store.find(request.path)
        if checkpoint.kind != "weights":
            raise TinkerRequestError(
                f"{request.path} is a sampler checkpoint; training needs tinker://RUN/weights/NAME (from save_state)"
            )
        if request.model_id is None:
            return self._create_from_checkpoint(request, checkpoint)
        saved, active = self.store.run(checkpoint.run_id), self.models.get(request.model_id)
        if self.sessions.touch(active.session_id).policy is None and not self.store.has(active.run.run_id):
            # The client does not know the extension, so that its new model takes the checkpoint's policy.
            active.run = replace(active.run, policy=saved.policy)
        run = active.run
        check_adapters(request.path, saved, run)

        def load(model: TrainableModel) -> dict[str, Any]:
            if model.policy != run.policy:
                active.trainable = model = TrainableModel(self.base_model, run.lora, run.policy)
            return _load(model, run.run_id, checkpoint, optimizer=request.optimizer)

        work = partial(self.models.compute, active, load)
        return self._start_once(request.seq_id, active, "load_weights", work)

    def _create_from_checkpoint(self, request: wire.LoadWeightsRequest, checkpoint: TinkerCheckpoint) -> dict[str, Any]:
        """Create a model with the adapters and the weights of a checkpoint."""
        assert request.session_id is not None  # checked by the request's type
        session, saved = self.sessions.touch(request.session_id), self.store.run(checkpoint.run_id)
        base_model, policy = request.base_model or saved.base_model, session.policy or saved.policy

        async def create(model: ActiveModel) -> dict[str, Any]:
            load = partial(_load, model_id=model.run.run_id, checkpoint=checkpoint, optimizer=request.optimizer)
            try:
                check_adapters(request.path, saved, model.run)
                await self.models.create_weights(model)
                return await self.models.compute(model, load)
            except BaseException:
                self.models.remove(model.run.run_id)
                raise

        return self._start_model(session, request, base_model, saved.lora, policy, create)

    def unload_model(self, model_id: str) -> dict[str, Any]:
        """Start to free a model's memory, and return the request's id."""
        model = self.models.get(model_id)

        async def unload() -> dict[str, Any]:
            self.models.remove(model_id)
            return {"type": "unload_model", "model_id": model_id}

        return {"request_id": self.futures.start(model.session_id, unload), "model_id": model_id}

    def _start_computation(
        self, request: wire.ModelRequest, kind: str, function: Callable[[TrainableModel], Result]
    ) -> dict[str, Any]:
        model = self.models.get(request.model_id)
        return self._start_once(request.seq_id, model, kind, lambda: self.models.compute(model, function))

    def _start_once(self, seq_id: int | None, model: ActiveModel, kind: str, work: Work) -> dict[str, Any]:
        """Start a request to a model, unless it is an earlier request that the client has sent again."""
        self.sessions.touch(model.session_id)

        def start() -> str:
            self.futures.check_capacity()
            return self.futures.start(model.session_id, work)

        return {"request_id": model.request_once(seq_id, kind, start), "model_id": model.run.run_id}

    # Sampling

    def create_sampling_session(self, request: wire.CreateSamplingSessionRequest) -> dict[str, Any]:
        """Create a sampling session for the base model or a checkpoint."""
        session = self.sessions.touch(request.session_id)
        source = self._source(request.model_path, request.base_model, session)
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
            source = self._source(request.model_path, request.base_model, None)
        if request.record_stability_info:
            raise TinkerRequestError(
                f"record_stability_info is set, but {STABLE_REINFORCE}; sample without it, and train with another "
                f"loss_fn: {', '.join(LOSSES)}"
            )
        base_model = self.base_model
        ids = parse_token_ids(request.prompt.ids, "prompt", base_model.vocab_size, base_model.max_length).tolist()
        check_scores(request, len(ids), base_model.vocab_size)
        if source is not None:
            self._snapshots.record_use(source)

        async def work() -> dict[str, Any]:
            async with self._samplers.acquire(source) as sampler:
                return await sample(base_model, sampler, request, ids, temperature)

        request_id = self.futures.start(session_id, work, can_cancel=True)
        sequence_ids = [f"{request_id}/{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    def _source(
        self, path: str | None, base_model: str | None, session: ClientSession | None
    ) -> TinkerCheckpoint | None:
        """Return the checkpoint to sample from; None for the base model."""
        if path is not None:
            checkpoint = self.store.find(path)
            if checkpoint.ephemeral and (session is None or not session.owns(checkpoint)):
                raise TinkerRequestError(
                    f"{path} has no name and can be used only by the client that saved it; save the weights with a "
                    "name (save_weights_for_sampler) to share them",
                    403,
                )
            return checkpoint
        if base_model is None:
            raise TinkerRequestError("the request names nothing to sample from; set model_path or base_model")
        self.base_model.check_name(base_model)
        return None

    def _add_sampler(self, session: ClientSession, source: TinkerCheckpoint | None) -> str:
        sampler_id = f"sampler-{uuid.uuid4().hex}"
        session.samplers[sampler_id] = source
        if source is not None:
            self._snapshots.record_use(source)
        return sampler_id

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
            self._snapshots.forget(path)

    def finish_session(self, session_id: str) -> None:
        """End a session that its client has closed; no error if it has ended."""
        for session in self.sessions:
            if session.session_id == session_id:
                self._end_session(session)

    def _end_session(self, session: ClientSession) -> None:
        self.sessions.end(session)
        self.futures.drop(session.session_id)
        for model_id, _ in session.models.values():
            self.models.remove(model_id)
            for checkpoint in self.store.checkpoints(model_id):
                if checkpoint.ephemeral:
                    self._snapshots.delete(checkpoint)

    async def close(self) -> None:
        """Stop everything and end all sessions; pending requests fail."""
        self.futures.close()
        await asyncio.to_thread(self.models.close)
        await asyncio.to_thread(self._samplers.close)
        for session in self.sessions:
            self._end_session(session)


def _load(model: TrainableModel, model_id: str, checkpoint: TinkerCheckpoint, *, optimizer: bool) -> dict[str, Any]:
    model.load(checkpoint.weights(), checkpoint.optimizer_state() if optimizer else None)
    return {"type": "load_weights", "path": checkpoint.path, "model_id": model_id}
