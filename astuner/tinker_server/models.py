"""The models in training. One thread computes for all of them, in request order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.tinker_server.base_model import BaseLanguageModel
from astuner.tinker_server.checkpoints import TrainingRun
from astuner.tinker_server.errors import TinkerRequestError
from astuner.tinker_server.trainable_model import TrainableModel
from astuner.tinker_server.wire import LoraSettings

_T = TypeVar("_T")
_MAX_REMEMBERED_REQUESTS = 256
"""Number of requests per model that are recognised when the client sends them again."""


@dataclass
class ActiveModel:
    """A model in training.

    Attributes:
        run: its training run.
        session_id: the client session that created it.
        trainable: the model; None until it is created and after it is unloaded.
        last_used: time of its last request, on the system's clock.
        requests: the kind and id of its requests, by the client's sequence number.
    """

    run: TrainingRun
    session_id: str
    trainable: TrainableModel | None = None
    last_used: float = field(default_factory=time.time)
    requests: OrderedDict[int, tuple[str, str]] = field(default_factory=OrderedDict)

    def earlier_request(self, seq_id: int | None, kind: str) -> str | None:
        """Return the request id if the client has sent this request before; clients resend unanswered requests.

        Raises:
            TinkerRequestError: another kind of request had this sequence number.
        """
        if seq_id is None or seq_id not in self.requests:
            return None
        earlier_kind, request_id = self.requests[seq_id]
        if earlier_kind != kind:
            raise TinkerRequestError(
                f"seq_id {seq_id} was used for {earlier_kind} and now for {kind}; only one client may train a model"
            )
        return request_id

    def remember_request(self, seq_id: int | None, kind: str, request_id: str) -> None:
        """Store a request for `earlier_request`."""
        if seq_id is not None:
            self.requests[seq_id] = kind, request_id
            while len(self.requests) > _MAX_REMEMBERED_REQUESTS:
                self.requests.popitem(last=False)


class ModelRegistry:
    """The models in training, by id. Belongs to one event loop."""

    def __init__(self, base_model: BaseLanguageModel) -> None:
        self._base_model = base_model
        self._models: dict[str, ActiveModel] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinker-train")
        self._closing = threading.Event()

    def __len__(self) -> int:
        return len(self._models)

    def runs(self) -> list[TrainingRun]:
        """Return the training runs of all models."""
        return [model.run for model in self._models.values()]

    def get(self, model_id: str) -> ActiveModel:
        """Return a model.

        Raises:
            TinkerRequestError: there is no such model.
        """
        if model_id not in self._models:
            raise TinkerRequestError(
                f"there is no model {model_id!r} in training: it was unloaded, its client was inactive for too long, "
                "or the server was restarted; load its last checkpoint into a new model",
                404,
            )
        model = self._models[model_id]
        model.last_used = time.time()
        return model

    def add(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraSettings,
        policy: TinkerPolicy,
        metadata: Mapping[str, Any],
    ) -> ActiveModel:
        """Add a model without weights; `create_weights` creates them.

        Args:
            session_id: the client session.
            model_seq_id: the client's number of the model in the session.
            base_model: the base model's name as sent by the client.
            lora: the adapters.
            policy: how the model computes.
            metadata: the client's metadata.
        """
        # The client composes the same id for a model that it creates from a checkpoint.
        run_id = f"{session_id}:train:{model_seq_id}"
        model = ActiveModel(TrainingRun(run_id, base_model, lora, policy, metadata, datetime.now(UTC)), session_id)
        self._models[run_id] = model
        return model

    async def create_weights(self, model: ActiveModel) -> None:
        """Create the weights of a new model.

        Raises:
            TinkerRequestError, ModelError: they cannot be created; the model is removed.
        """
        try:
            create = partial(TrainableModel, self._base_model, model.run.lora, model.run.policy)
            model.trainable = await self._submit(create)
        except BaseException:
            self.remove(model.run.run_id)
            raise

    async def compute(self, model: ActiveModel, function: Callable[[TrainableModel], _T]) -> _T:
        """Call `function` on the training thread, after all earlier requests."""

        def call() -> _T:
            self.check_open()
            if model.trainable is None:
                raise TinkerRequestError(f"model {model.run.run_id} was unloaded before the request was computed", 404)
            return function(model.trainable)

        return await self._submit(call)

    def check_open(self) -> None:
        """Raise TinkerRequestError if the server is shutting down."""
        if self._closing.is_set():
            raise TinkerRequestError("the server is shutting down", 410)

    def remove(self, model_id: str) -> None:
        """Remove a model; its memory is freed after its current computation."""
        model = self._models.pop(model_id, None)
        if model is not None and not self._closing.is_set():
            self._executor.submit(partial(setattr, model, "trainable", None))

    def close(self) -> None:
        """Stop the training thread after its current batch."""
        self._closing.set()
        self._executor.shutdown(cancel_futures=True)

    def _submit(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function)
