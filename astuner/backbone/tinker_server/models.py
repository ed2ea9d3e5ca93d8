"""The models in training: one thread computes for all of them, in the order of the requests."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from astuner.backbone.tinker_server.checkpoints import Run
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.backbone.tinker_server.trainee import Trainee
from astuner.backbone.tinker_server.wire import CreateModelRequest, LoraSettings

_T = TypeVar("_T")
_REMEMBERED = 256
"""Requests of a model that are known when they come again."""


@dataclass
class Model:
    """A model in training.

    Attributes:
        run: what it is, also on disk.
        session_id: whose it is.
        trainee: the weights; None until they are made, and once it is gone.
        used: when it was last asked for anything, on the system's clock.
        requests: request ids by the client's own numbers, with what was asked.
    """

    run: Run
    session_id: str
    trainee: Trainee | None = None
    used: float = field(default_factory=time.time)
    requests: OrderedDict[int, tuple[str, str]] = field(default_factory=OrderedDict)

    def known_request(self, number: int | None, kind: str) -> str | None:
        """Return the request id of a request that was sent before: the client sends again what got no answer.

        Raises:
            Refusal: another request had this number.
        """
        if number is None or number not in self.requests:
            return None
        before, request_id = self.requests[number]
        if before != kind:
            raise Refusal(f"seq_id {number} was {before} before and is {kind} now; one client trains a model")
        return request_id

    def remember(self, number: int | None, kind: str, request_id: str) -> None:
        """Note a request."""
        if number is not None:
            self.requests[number] = kind, request_id
            while len(self.requests) > _REMEMBERED:
                self.requests.popitem(last=False)


class Models:
    """At most `most` models in training. Belongs to one event loop."""

    def __init__(self, start: StartingModel, most: int) -> None:
        self._start, self.most = start, most
        self._models: dict[str, Model] = {}
        self._trainer = ThreadPoolExecutor(1, thread_name_prefix="tinker-train")
        self._closing = threading.Event()

    def __len__(self) -> int:
        return len(self._models)

    def runs(self) -> list[Run]:
        """Return what is in training."""
        return [model.run for model in self._models.values()]

    def of(self, model_id: str) -> Model:
        """Return a model.

        Raises:
            Refusal: there is none of that id.
        """
        if model_id not in self._models:
            raise Refusal(
                f"there is no model {model_id!r} in training here: it was unloaded, its client was silent for too "
                "long, or the server was restarted; load its last checkpoint into a new one",
                404,
            )
        model = self._models[model_id]
        model.used = time.time()
        return model

    def begin(self, request: CreateModelRequest) -> Model:
        """Take a place for a new model, whose weights `make` makes."""
        lora = request.lora_config or LoraSettings(rank=0)
        run = Run(uuid.uuid4().hex, request.base_model, lora, request.user_metadata or {}, datetime.now(UTC))
        model = Model(run, request.session_id)
        self._models[run.run_id] = model
        return model

    async def make(self, model: Model) -> None:
        """Make the weights of a model that has begun.

        Raises:
            Refusal, ModelError: that cannot be done; its place is free again.
        """

        try:
            model.trainee = await self._in_turn(partial(Trainee, self._start, model.run.lora))
        except BaseException:
            self.end(model.run.run_id)
            raise

    async def work(self, model: Model, do: Callable[[Trainee], _T]) -> _T:
        """Have the trainer's thread do something with a model, after all that was asked for before."""

        def doing() -> _T:
            self.check()
            if model.trainee is None:
                raise Refusal(f"model {model.run.run_id} was unloaded before its turn came", 404)
            return do(model.trainee)

        return await self._in_turn(doing)

    def check(self) -> None:
        """Raise where the server is ending."""
        if self._closing.is_set():
            raise Refusal("the server is ending", 410)

    def end(self, model_id: str) -> None:
        """Forget a model, and free its weights once what it computes now is done."""
        model = self._models.pop(model_id, None)
        if model is not None and not self._closing.is_set():
            self._trainer.submit(partial(setattr, model, "trainee", None))

    def close(self) -> None:
        """End what is being computed, after its present batch."""
        self._closing.set()
        self._trainer.shutdown(cancel_futures=True)

    def _in_turn(self, do: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._trainer, do)
