"""Sampling: pools embedded engines, one for each set of weights in use, and handles sampling requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from astuner.errors import ModelError
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.weight_digests import WeightDigests, differing_weights, weight_digests
from astuner.schema import SamplingParams
from astuner.tinker_server import wire
from astuner.tinker_server.checkpoints import CheckpointStore, TinkerCheckpoint
from astuner.tinker_server.prompt_scores import score_prompt
from astuner.tinker_server.trainable_model import BaseLanguageModel, load_weights, weights_with_adapters
from astuner.tinker_server.wire import TinkerRequestError

_Source = TinkerCheckpoint | None
"""The checkpoint to sample from; None for the base model."""
_VERSIONS = itertools.count(1)


class Sampler:
    """An engine, and a copy of its model for prompt log-probabilities.

    Attributes:
        users: number of requests that hold the sampler.
        idle: set while there are none.
        last_used: time of the last release, on the monotonic clock.
    """

    def __init__(self, base_model: BaseLanguageModel) -> None:
        self._model = base_model.copy()
        self._device, self._dtype = base_model.device, next(self._model.parameters()).dtype
        self._scoring = threading.Lock()  # A scoring pass has all logits of a prompt in memory.
        self.engine = EmbeddedEngine(self._model, max_model_len=base_model.max_length, tokenizer=base_model.tokenizer)
        self.users = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.last_used = time.monotonic()

    def acquire(self) -> None:
        """Increment the number of users."""
        self.users += 1
        self.idle.clear()

    def release(self) -> None:
        """Decrement the number of users."""
        self.users -= 1
        self.last_used = time.monotonic()
        if self.users == 0:
            self.idle.set()

    def load(self, weights: Mapping[str, Tensor], expected: WeightDigests) -> None:
        """Replace all weights; the sampler must have no users.

        `expected` has the checksums of the trainer's weights; it is empty if they are unknown.

        Raises:
            ModelError: the weights do not fit the model, or the engine does not have those of the trainer afterwards.
        """
        before = self.engine.weight_digests()
        self.engine.update_weights(weights, next(_VERSIONS))
        # A small model's engine has its own copy of the weights.
        load_weights(self._model, weights)
        held = self.engine.weight_digests()
        names = differing_weights(expected or weight_digests(weights.items(), self._dtype), held)
        if names:
            stale = all(held[name] == before.get(name) for name in names)
            raise ModelError(
                f"the sampler of the Tinker server does not have the trainer's weights: {len(names)} of {len(held)} "
                f"differ ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}); "
                + ("they are those from before the sync" if stale else "they changed on the way")
                + ". Report a bug"
            )

    def score(self, ids: list[int], request: wire.SampleRequest, temperature: float) -> dict[str, Any]:
        """Return the scores of a prompt; see `score_prompt`."""
        with self._scoring, torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0, :-1]
            return score_prompt(logits, ids, request, temperature)


class SamplerPool:
    """A pool of at most `max_samplers` samplers, each with one checkpoint's weights. Belongs to one event loop.

    If the pool is full, the least recently used sampler is loaded with the new weights once its requests have ended.
    """

    def __init__(self, base_model: BaseLanguageModel, store: CheckpointStore, max_samplers: int) -> None:
        self._base_model, self._store, self._max_samplers = base_model, store, max_samplers
        self._samplers: dict[_Source, Sampler] = {}
        self._change_lock = asyncio.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinker-load")

    @contextlib.asynccontextmanager
    async def acquire(self, source: _Source) -> AsyncIterator[Sampler]:
        """Yield a sampler whose weights do not change during the block.

        Raises:
            RecordError, TinkerRequestError: the weights cannot be read or do not fit the model.
        """
        sampler = self._try_acquire(source) or await self._create(source)
        try:
            yield sampler
        finally:
            sampler.release()

    def is_in_use(self, path: str) -> bool:
        """Return whether a request is sampling from the checkpoint."""
        return any(
            source is not None and source.path == path and sampler.users for source, sampler in self._samplers.items()
        )

    def close(self) -> None:
        """Stop all engines; their requests fail."""
        self._executor.shutdown()
        for sampler in self._samplers.values():
            sampler.engine.close()
        self._samplers.clear()

    def _try_acquire(self, source: _Source) -> Sampler | None:
        """Acquire and return the sampler of `source`; None if there is no working one."""
        sampler = self._samplers.get(source)
        if sampler is None:
            return None
        try:
            sampler.engine.raise_if_broken()
        except ModelError as error:
            logger.warning("a sampler failed and is created again: {}", error)
            del self._samplers[source]
            sampler.engine.close()
            return None
        sampler.acquire()
        return sampler

    async def _create(self, source: _Source) -> Sampler:
        # If the request is cancelled, loading continues and the sampler is then released.
        load = asyncio.create_task(self._load(source))
        try:
            return await asyncio.shield(load)
        except asyncio.CancelledError:
            load.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else done.result().release()
            )
            raise

    async def _load(self, source: _Source) -> Sampler:
        """Return an acquired sampler of `source`: a new one, or the least recently used one with replaced weights."""
        # The lock is fair: a request that waits for a busy sampler is not overtaken by that sampler's next requests.
        async with self._change_lock:
            if (sampler := self._try_acquire(source)) is not None:
                return sampler
            run = partial(asyncio.get_running_loop().run_in_executor, self._executor)
            weights = await run(self._weights, source)
            expected = {} if source is None else await run(source.digests)
            if len(self._samplers) < self._max_samplers:
                sampler = await run(Sampler, self._base_model)
            else:
                samplers = self._samplers
                least_used = min(samplers, key=lambda key: (samplers[key].users > 0, samplers[key].last_used))
                sampler = samplers.pop(least_used)
                await sampler.idle.wait()
            try:
                await run(sampler.load, weights, expected)
            except Exception:
                sampler.engine.close()
                raise
            sampler.acquire()
            self._samplers[source] = sampler
            return sampler

    def _weights(self, source: _Source) -> Mapping[str, Tensor]:
        """Return all weights of a model by name."""
        base = self._base_model.weights()
        if source is None:
            return base
        trained, run = source.weights(), self._store.run(source.run_id)
        if not run.lora.rank:
            return {**base, **trained}
        return weights_with_adapters(self._base_model, run.lora, run.policy, trained)


async def sample(
    base_model: BaseLanguageModel, sampler: Sampler, request: wire.SampleRequest, ids: list[int], temperature: float
) -> dict[str, Any]:
    """Handle a sampling request, and return Tinker's SampleResponse.

    The samples are computed concurrently, together with those of other requests.

    Args:
        base_model: has the tokenizer and the stop tokens.
        sampler: has the weights.
        request: the request.
        ids: the validated prompt.
        temperature: divides the logits of the prompt's log-probabilities.

    Raises:
        TinkerRequestError: a stop string is empty.
    """
    stop = request.sampling_params.stop
    stop = [stop] if isinstance(stop, str) else stop or []
    stop_texts = [item for item in stop if isinstance(item, str)]
    if "" in stop_texts:
        raise TinkerRequestError("sampling_params.stop has an empty string; leave it out to stop at end tokens only")
    stop_ids = [item for item in stop if isinstance(item, int)]
    options = request.sampling_params
    # An empty list of stops means that no token ends a sample, not even the model's end tokens.
    end_ids = () if options.stop == [] else base_model.stop_token_ids
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=base_model.max_length if options.max_tokens is None else options.max_tokens,
        stop_token_ids=(*end_ids, *stop_ids),
        stop=tuple(stop_texts),
        top_logprobs=request.topk_sample_logprobs,
    )
    completions = asyncio.gather(
        *(
            sampler.engine.generate(ids, replace(params, seed=_seed(options.seed, index)))
            for index in range(request.num_samples)
        )
    )
    scores: dict[str, Any] = {}
    if (
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.target_prompt_logprobs
        or request.prompt_alt_tokens_k
    ):
        samples, scores = await asyncio.gather(completions, asyncio.to_thread(sampler.score, ids, request, temperature))
    else:
        samples = await completions
    sequences = [
        {"stop_reason": item.finish_reason, "tokens": list(item.token_ids), "logprobs": list(item.logprobs)}
        | ({"topk_logprobs": item.top_logprobs} if request.topk_sample_logprobs else {})
        for item in samples
    ]
    return {"type": "sample", "sequences": sequences, **scores}


def _seed(seed: int | None, index: int) -> int | None:
    """Return the seed for sample `index` in a request. It differs from those for requests with nearby seeds."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


class SamplerCheckpoints:
    """Records the use of sampler checkpoints, and deletes the least recently used ones beyond a limit."""

    def __init__(self, store: CheckpointStore, samplers: SamplerPool, limit: int) -> None:
        """Start without any recorded use; `limit` is the maximum number of sampler checkpoints per training run."""
        self._store, self._samplers, self._limit = store, samplers, limit
        # By path, the number of the request that used the checkpoint last.
        self._last_use: dict[str, int] = {}
        self._use_count = 0

    def record_use(self, checkpoint: TinkerCheckpoint) -> None:
        """Record that a request uses the checkpoint."""
        self._use_count += 1
        self._last_use[checkpoint.path] = self._use_count

    def delete_old(self, run_id: str) -> None:
        """Delete the least recently used sampler checkpoints of a training run beyond the limit."""
        checkpoints = self._store.checkpoints(run_id)
        snapshots = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "sampler_weights"]
        by_use = sorted(snapshots[:-1], key=lambda item: (self._last_use.get(item.path, 0), item.time))
        for snapshot in by_use[: max(0, len(snapshots) - self._limit)]:
            if not self._samplers.is_in_use(snapshot.path):
                level = "DEBUG" if snapshot.ephemeral else "INFO"
                message = "{} is deleted to make room for newer sampler weights (--max-samplers {})"
                logger.log(level, message, snapshot.path, self._limit)
                self.delete(snapshot)

    def delete(self, checkpoint: TinkerCheckpoint) -> None:
        """Delete a checkpoint."""
        self._store.delete(checkpoint)
        self.forget(checkpoint.path)

    def forget(self, path: str) -> None:
        """Forget the use of a checkpoint that was deleted."""
        self._last_use.pop(path, None)
