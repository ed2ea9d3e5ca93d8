"""Embedded engines, one for each set of weights that is sampled from, within a limit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from loguru import logger
from torch import Tensor
from torch.nn import functional

from astuner.backbone.tinker_server.checkpoints import Checkpoint, CheckpointStore
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.backbone.tinker_server.trainee import adapted_weights, load_trained
from astuner.errors import ModelError
from astuner.llm_engine.embedded import EmbeddedEngine

PromptLogprobs = tuple[list[float | None], list[list[tuple[int, float]] | None]]
_Key = Checkpoint | None
_VERSIONS = itertools.count(1)


class Sampler:
    """An engine with some weights, and the same model for what the engine does not compute.

    Attributes:
        engine: samples.
        users: requests that hold it.
        idle: set while there are none.
        used: when one last did, on the monotonic clock.
    """

    def __init__(self, start: StartingModel) -> None:
        self._model = start.copy()
        self._device = start.device
        self._scoring = threading.Lock()  # Each pass has all of a prompt's logits in memory.
        self.engine = EmbeddedEngine(self._model, max_model_len=start.max_length)
        self.users = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.used = time.monotonic()

    def take(self) -> None:
        """Hold it once more."""
        self.users += 1
        self.idle.clear()

    def leave(self) -> None:
        """Hold it no longer."""
        self.users -= 1
        self.used = time.monotonic()
        if self.users == 0:
            self.idle.set()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take other weights, all of them by name; nobody may hold it."""
        self.engine.update_weights(weights, next(_VERSIONS))
        # Where the model is small, the engine has a copy of its own.
        load_trained(self._model, weights)

    def prompt_logprobs(self, ids: list[int], most: int) -> PromptLogprobs:
        """Return the log-probability of each token of a prompt, and the `most` likeliest tokens at its place.

        There is none of either for the first.
        """
        with self._scoring, torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0, :-1]
            targets = torch.tensor(ids[1:], device=self._device)
            chosen = -functional.cross_entropy(logits.float(), targets, reduction="none")
            if not most:
                return [None, *chosen.tolist()], []
            top = torch.log_softmax(logits.float(), dim=-1).topk(min(most, logits.shape[-1]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [None, *chosen.tolist()], [None, *(list(zip(*pair, strict=True)) for pair in pairs)]


class SamplerPool:
    """Samplers by their weights: None is the starting model's. Belongs to one event loop.

    Where there are `most` of them, the one that was idle longest gets other weights, once its requests have ended.
    """

    def __init__(self, start: StartingModel, store: CheckpointStore, most: int) -> None:
        self._start, self._store, self._most = start, store, most
        self._samplers: dict[_Key, Sampler] = {}
        self._changing = asyncio.Lock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tinker-load")

    @contextlib.asynccontextmanager
    async def hold(self, key: _Key) -> AsyncIterator[Sampler]:
        """Give the sampler of some weights, which keeps them during the block.

        Raises:
            RecordError, Refusal: the weights cannot be read, or do not fit.
        """
        sampler = self._ready(key) or await self._make(key)
        try:
            yield sampler
        finally:
            sampler.leave()

    def is_held(self, path: str) -> bool:
        """Whether a request is sampling from a checkpoint."""
        return any(key is not None and key.path == path and one.users for key, one in self._samplers.items())

    def close(self) -> None:
        """Stop all engines; their requests fail."""
        self._loader.shutdown()
        for sampler in self._samplers.values():
            sampler.engine.close()
        self._samplers.clear()

    def _ready(self, key: _Key) -> Sampler | None:
        """Return the sampler of `key`, held once more, if there is one that works."""
        sampler = self._samplers.get(key)
        if sampler is None:
            return None
        try:
            sampler.engine.raise_if_broken()
        except ModelError as error:
            logger.warning("a sampler broke and is made anew: {}", error)
            del self._samplers[key]
            sampler.engine.close()
            return None
        sampler.take()
        return sampler

    async def _make(self, key: _Key) -> Sampler:
        # Whoever asked may go away in the middle; what was begun is finished then, and let go.
        change = asyncio.create_task(self._change(key))
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            change.add_done_callback(_let_go)
            raise

    async def _change(self, key: _Key) -> Sampler:
        """Return the sampler of `key`, held once more, made or taken from other weights."""
        # One at a time, in the order of asking: whoever waits for a busy one is not overtaken by its next requests.
        async with self._changing:
            if (sampler := self._ready(key)) is not None:
                return sampler
            run = partial(asyncio.get_running_loop().run_in_executor, self._loader)
            weights = await run(self._weights, key)
            sampler = await self._spare() if len(self._samplers) >= self._most else await run(Sampler, self._start)
            try:
                await run(sampler.load, weights)
            except Exception:
                sampler.engine.close()
                raise
            sampler.take()
            self._samplers[key] = sampler
            return sampler

    async def _spare(self) -> Sampler:
        """Take the sampler that was idle longest out of use, once nobody holds it."""
        key = min(self._samplers, key=lambda one: (self._samplers[one].users > 0, self._samplers[one].used))
        sampler = self._samplers.pop(key)
        await sampler.idle.wait()
        return sampler

    def _weights(self, key: _Key) -> Mapping[str, Tensor]:
        """Return all weights of a model by name."""
        base = self._start.weights()
        if key is None:
            return base
        trained, lora = key.weights(), self._store.run(key.run_id).lora
        return adapted_weights(self._start, lora, trained) if lora.rank else {**base, **trained}


def _let_go(change: asyncio.Task[Sampler]) -> None:
    if not change.cancelled() and change.exception() is None:
        change.result().leave()
