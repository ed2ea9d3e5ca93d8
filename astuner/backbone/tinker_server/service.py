"""What the server does, apart from HTTP: one method for each kind of request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.backbone.tinker_server import wire
from astuner.backbone.tinker_server.checkpoints import Checkpoint, CheckpointStore, Kind
from astuner.backbone.tinker_server.data import checked, checked_ids
from astuner.backbone.tinker_server.futures import Futures, Work
from astuner.backbone.tinker_server.models import Model, Models
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.samplers import SamplerPool
from astuner.backbone.tinker_server.sampling import sample
from astuner.backbone.tinker_server.sessions import EXPIRES_SECONDS, SILENT_SECONDS, Session, Sessions
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.backbone.tinker_server.trainee import Trainee


@dataclass(frozen=True)
class Limits:
    """How much the server holds.

    Attributes:
        models: models in training.
        engines: sets of weights in memory to sample from.
        snapshots: weights for samplers that are kept of each training run.
    """

    models: int = 4
    engines: int = 3
    snapshots: int = 8


class TinkerService:
    """Sessions, models, samplers and checkpoints over one starting model. Belongs to one event loop."""

    def __init__(self, start: StartingModel, folder: Path, limits: Limits) -> None:
        self.start, self._limits = start, limits
        self.store = CheckpointStore(folder)
        self.sessions = Sessions()
        self.futures = Futures()
        self.models = Models(start, limits.models)
        self._pool = SamplerPool(start, self.store, limits.engines)
        self._sampled: dict[str, int] = {}
        self._clock = 0

    # Training

    def create_model(self, request: wire.CreateModelRequest) -> dict[str, Any]:
        """Begin a training run."""
        session = self.sessions.heard_of(request.session_id)
        if request.model_seq_id in session.models:  # sent again for want of an answer
            model_id, request_id = session.models[request.model_seq_id]
            return {"request_id": request_id, "model_id": model_id}
        self.start.check_name(request.base_model)
        self._make_room()
        model = self.models.begin(request)

        async def create() -> dict[str, Any]:
            await self.models.make(model)
            return {"type": "create_model", "model_id": model.run.run_id}

        begun = self._begun(session.session_id, create, model)
        session.models[request.model_seq_id] = (model.run.run_id, begun["request_id"])
        return begun

    def _make_room(self) -> None:
        """See to it that one more model may be made."""
        for session in self.sessions.silent_for(SILENT_SECONDS):
            if len(self.models) >= self._limits.models and session.models:
                logger.warning("session {} was silent for a minute; its models make room", session.session_id)
                self._end(session)
        if len(self.models) >= self._limits.models:
            raise Refusal(
                f"{len(self.models)} models are in training, and this server holds no more; end a client that is done "
                "with its own, or start the server with a higher --max-models"
            )

    def forward(self, request: wire.ForwardRequest) -> dict[str, Any]:
        """Compute log-probabilities and the loss."""
        return self._pass(request, request.forward_input, backward=False)

    def forward_backward(self, request: wire.ForwardBackwardRequest) -> dict[str, Any]:
        """Compute them, and add the gradient to what is accumulated."""
        return self._pass(request, request.forward_backward_input, backward=True)

    def _pass(self, request: wire.ModelRequest, given: wire.ForwardBackwardInput, *, backward: bool) -> dict[str, Any]:
        asked = checked(given, self.start.vocab_size, self.start.max_length)
        run = partial(Trainee.run, asked=asked, backward=backward, check=self.models.check)
        return self._train(request, "forward_backward" if backward else "forward", run)

    def optim_step(self, request: wire.OptimStepRequest) -> dict[str, Any]:
        """Move the weights."""
        return self._train(request, "optim_step", lambda trainee: trainee.optim_step(request.adam_params))

    def save_weights(self, request: wire.SaveWeightsRequest) -> dict[str, Any]:
        """Write weights and optimiser."""
        model = self.models.of(request.model_id)

        def save(trainee: Trainee) -> dict[str, Any]:
            checkpoint = self.store.save(
                model.run,
                "weights",
                request.path or f"checkpoint-{uuid.uuid4().hex[:8]}",
                trainee.weights(),
                trainee.optimiser(),
                ttl_seconds=request.ttl_seconds,
                overwrite=request.overwrite,
            )
            return {"type": "save_weights", "path": checkpoint.path}

        return self._train(request, "save_weights", save)

    def save_weights_for_sampler(self, request: wire.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        """Write weights to sample from; without a name, begin a sampling session with them."""
        model = self.models.of(request.model_id)
        name = request.path or f"ephemeral-{uuid.uuid4().hex[:8]}"

        def save(trainee: Trainee) -> Checkpoint:
            return self.store.save(
                model.run,
                "sampler_weights",
                name,
                trainee.weights(),
                None,
                ttl_seconds=request.ttl_seconds,
                ephemeral=request.path is None,
            )

        async def saved() -> dict[str, Any]:
            checkpoint = await self.models.work(model, save)
            self._note_use(checkpoint)
            self._drop_old_snapshots(model)
            if request.path is not None:
                return {"type": "save_weights_for_sampler", "path": checkpoint.path}
            sampler_id = self._new_sampler(self.sessions.heard_of(model.session_id), checkpoint)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._once(request, model, "save_weights_for_sampler", saved)

    def load_weights(self, request: wire.LoadWeightsRequest) -> dict[str, Any]:
        """Take weights back, with or without the optimiser."""
        checkpoint = self.store.find(request.path)
        if checkpoint.kind != "weights":
            raise Refusal(
                f"{request.path} is for samplers; training goes on from tinker://RUN/weights/NAME (save_state)"
            )
        model = self.models.of(request.model_id)
        theirs, ours = (run.lora.model_dump(exclude={"seed"}) for run in (self.store.run(checkpoint.run_id), model.run))
        if theirs != ours:
            raise Refusal(f"{request.path} has adapters {theirs}, this model has {ours}; create a model like it")

        def load(trainee: Trainee) -> dict[str, Any]:
            trainee.load(checkpoint.weights(), checkpoint.optimiser() if request.optimizer else None)
            return {"type": "load_weights", "path": checkpoint.path}

        return self._train(request, "load_weights", load)

    def unload_model(self, model_id: str) -> dict[str, Any]:
        """Free a model's memory."""
        model = self.models.of(model_id)

        async def unload() -> dict[str, Any]:
            self.models.end(model_id)
            return {"type": "unload_model", "model_id": model_id}

        return self._begun(model.session_id, unload, model)

    # Sampling

    def create_sampling_session(self, request: wire.CreateSamplingSessionRequest) -> dict[str, Any]:
        """Choose what to sample from."""
        session = self.sessions.heard_of(request.session_id)
        source = self._source(request.model_path, request.base_model)
        return {"type": "create_sampling_session", "sampling_session_id": self._new_sampler(session, source)}

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        """Say what a sampling session samples from."""
        _, source = self.sessions.sampler(sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self.start.tokenizer_name,
            "model_path": source.path if source else None,
        }

    def sample(self, request: wire.SampleRequest) -> dict[str, Any]:
        """Sample after a prompt."""
        self.futures.check_room()
        session_id = ""
        if request.sampling_session_id is not None:
            session, source = self.sessions.sampler(request.sampling_session_id)
            session_id = session.session_id
        else:
            source = self._source(request.model_path, request.base_model)
        ids = checked_ids(request.prompt.ids, "prompt", self.start.vocab_size, self.start.max_length).tolist()
        if source is not None:
            self._note_use(source)

        async def sampled() -> dict[str, Any]:
            async with self._pool.hold(source) as sampler:
                return await sample(self.start, sampler, request, ids)

        return self._begun(session_id, sampled)

    def _source(self, path: str | None, base_model: str | None) -> Checkpoint | None:
        """Return the weights that a client wants to sample from; None for the starting model's."""
        if path is not None:
            return self.store.find(path)
        if base_model is None:
            raise Refusal("give model_path or base_model, so that it is known what to sample from")
        self.start.check_name(base_model)
        return None

    def _new_sampler(self, session: Session, source: Checkpoint | None) -> str:
        sampler_id = f"sampler-{uuid.uuid4().hex}"
        session.samplers[sampler_id] = source
        if source is not None:
            self._note_use(source)
        return sampler_id

    def _note_use(self, checkpoint: Checkpoint) -> None:
        self._clock += 1
        self._sampled[checkpoint.path] = self._clock

    def _drop_old_snapshots(self, model: Model) -> None:
        """Remove the weights for samplers that were not used for longest, beyond how many are kept."""
        kind: Kind = "sampler_weights"
        kept = [one for one in self.store.checkpoints(model.run.run_id) if one.kind == kind]
        by_use = sorted(kept[:-1], key=lambda one: (self._sampled.get(one.path, 0), one.time))
        for old in by_use[: max(0, len(kept) - self._limits.snapshots)]:
            if not self._pool.is_held(old.path):
                level = "DEBUG" if old.ephemeral else "INFO"
                logger.log(
                    level, "{} makes room for newer weights (--max-samplers {})", old.path, self._limits.snapshots
                )
                self._delete(old)

    # Life

    def sweep(self) -> None:
        """End silent clients, and remove what has expired."""
        for session in self.sessions.silent_for(EXPIRES_SECONDS):
            logger.warning("session {} was silent for {:.0f} s and is ended", session.session_id, EXPIRES_SECONDS)
            self._end(session)
        self.futures.sweep()
        for path in self.store.delete_expired():
            logger.info("{} has expired", path)
            self._sampled.pop(path, None)

    def _end(self, session: Session) -> None:
        self.sessions.end(session)
        self.futures.drop(session.session_id)
        for model_id, _ in session.models.values():
            self.models.end(model_id)
        for source in session.samplers.values():
            if source is not None and source.ephemeral:
                self._delete(source)

    def _delete(self, checkpoint: Checkpoint) -> None:
        self.store.delete(checkpoint)
        self._sampled.pop(checkpoint.path, None)

    async def close(self) -> None:
        """End everything; what a client still waits for fails."""
        self.futures.close()
        await asyncio.to_thread(self.models.close)
        await asyncio.to_thread(self._pool.close)
        for session in self.sessions:
            self._end(session)

    # Requests that become futures

    def _train(self, request: wire.ModelRequest, kind: str, do: Callable[[Trainee], dict[str, Any]]) -> dict[str, Any]:
        model = self.models.of(request.model_id)
        return self._once(request, model, kind, lambda: self.models.work(model, do))

    def _once(self, request: wire.ModelRequest, model: Model, kind: str, work: Work) -> dict[str, Any]:
        """Begin a request to a model, unless it is one that was begun before."""
        self.sessions.heard_of(model.session_id)
        request_id = model.known_request(request.seq_id, kind)
        if request_id is None:
            self.futures.check_room()
            request_id = self.futures.start(model.session_id, work)
            model.remember(request.seq_id, kind, request_id)
        return {"request_id": request_id, "model_id": model.run.run_id}

    def _begun(self, session_id: str, work: Work, model: Model | None = None) -> dict[str, Any]:
        request_id = self.futures.start(session_id, work)
        return {"request_id": request_id, **({"model_id": model.run.run_id} if model else {})}
