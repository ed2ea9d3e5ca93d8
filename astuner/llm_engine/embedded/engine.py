"""The engine's public face: coroutines on one side, the worker thread that owns the model on the other."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from astuner.errors import ContextLengthError, ModelError
from astuner.llm_engine.embedded import fast_forward
from astuner.llm_engine.embedded.fallback_forward import UncachedFallback, fallback_forward
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.llm_engine.embedded.forward import Forward
from astuner.llm_engine.embedded.memory import default_lane_tokens, default_prefix_cache_tokens
from astuner.llm_engine.embedded.request import Request
from astuner.llm_engine.embedded.scheduler import EngineStats, Scheduler
from astuner.schema import Completion, SamplingParams

# On a CPU, the operations of smaller models take some 50 µs each. Two threads then gain a third on an idle machine,
# gain nothing where the agents' own Python needs the other core, and crawl where cores are short.
_ONE_THREAD_PARAMETERS = 5_000_000


@dataclass(frozen=True, slots=True)
class _WeightUpdate:
    weights: Mapping[str, Tensor]
    policy_version: int
    done: Future[None]


class EmbeddedEngine:
    """Samples from a transformers model in this process, with continuous batching and prefix reuse.

    Llama-, Qwen2- and Qwen3-shaped models run on a forward pass of our own, all others through transformers' own.
    The device and the dtype are the model's.

    The engine may write to `model` (see `update_weights`) and puts it into evaluation mode where it runs
    transformers' own forward, so a model that is also being trained should be a copy, unless `update_weights` is only
    ever given that very model's state dict.

    Memory: the cache of running requests grows with their actual lengths (within a factor of four: lengths
    and numbers of lanes are rounded up), up to half of the
    memory that was free when the engine was made; beyond that, the youngest requests are put off and computed again.
    The prefix cache comes on top.

    Args:
        model: any `AutoModelForCausalLM`.
        max_model_len: the most tokens, prompt and completion together, of a request; lowered to the model's
            `max_position_embeddings` where that is less.
        max_num_seqs: the most requests computed at once.
        prefix_cache_tokens: capacity of the prefix cache; by default 1024 × `max_num_seqs`, at most an eighth
            of the free memory. 0 turns prefix reuse off.
        policy_version: the version of the weights that `model` has now.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        max_num_seqs: int = 64,
        prefix_cache_tokens: int | None = None,
        policy_version: int = 0,
    ) -> None:
        self._max_model_len = _model_limit(model, max_model_len)
        self._forward: Forward = (
            FastForward(model, self._max_model_len) if fast_forward.supports(model) else fallback_forward(model)
        )
        if isinstance(self._forward, UncachedFallback):
            prefix_cache_tokens = 0  # There is nothing to keep.
        elif prefix_cache_tokens is None:
            prefix_cache_tokens = default_prefix_cache_tokens(self._forward.kv_shape, max_num_seqs)
        self._scheduler = Scheduler(
            self._forward,
            max_model_len=self._max_model_len,
            max_num_seqs=max_num_seqs,
            prefix_cache_tokens=prefix_cache_tokens,
            lane_tokens=default_lane_tokens(self._forward.kv_shape, max_num_seqs, self._max_model_len),
            policy_version=policy_version,
        )
        self._updates: deque[_WeightUpdate] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards the order of "failed" and "put into the inbox": nothing is put there after the last look into it.
        self._lock = threading.Lock()
        self._failure: ModelError | None = None
        self._closing = False
        small = self._forward.kv_shape.device.type == "cpu" and model.num_parameters() < _ONE_THREAD_PARAMETERS
        self._thread = threading.Thread(target=self._run, args=(small,), name="embedded-engine", daemon=True)
        self._start_worker()
        # A daemon thread must not be inside a tensor operation while the interpreter is torn down.
        atexit.register(self.close)

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and completion together, that a request may have."""
        return self._max_model_len

    @property
    def policy_version(self) -> int:
        """The version of the weights that new requests are sampled with."""
        return self._scheduler.policy_version

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self._scheduler.stats

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stops: Callable[[Sequence[int]], bool] | None = None,
    ) -> Completion:
        """Sample one completion; cancelling the coroutine gives its place to another request.

        Args:
            prompt_ids: at least one token id.
            params: how to sample.
            stops: asked after every sampled token, with the ids sampled so far; where it returns True, the completion
                ends with that token. It is called in the engine's thread, so it has to be quick, and must not raise.

        With `params.seed`, the random draws do not depend on what is computed beside the request (logits may, in
        their last bits).

        Raises:
            ContextLengthError: the prompt leaves no room for a single token.
            ModelError: the engine is closed or broken, or a parameter or token id is out of range.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        request = self._request(prompt_ids, params, partial(_deliver, loop, answer), stops)
        self._post(partial(self._scheduler.submit, request))
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(partial(self._scheduler.cancel, request), or_raise=False)
            raise

    def update_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> None:
        """Sample all further requests with new weights; blocks until they are in use.

        Requests that were begun are finished with the old weights first, those that still wait get the new ones.
        The prefix cache is dropped.

        Args:
            state_dict: all of the model's weights under its own names, adapters merged; a tied weight may be given
                under one of its names. Not changed by the engine, nor to be changed by others during the call.
            policy_version: what completions report from then on.

        Raises:
            ModelError: names, shapes or ties do not fit (the old weights stay), or the engine is closed or broken.
        """
        update = _WeightUpdate(state_dict, policy_version, Future())
        self._post(partial(self._updates.append, update))
        update.done.result()

    def raise_if_broken(self) -> None:
        """Say so where the engine can no longer answer.

        Raises:
            ModelError: with what ended it.
        """
        with self._lock:
            if self._failure is not None:
                raise ModelError(str(self._failure)) from self._failure.__cause__

    def free_cache(self) -> None:
        """Give back the memory of cached prefixes and idle places, if it is much, unless a request is in flight."""
        self._post(self._free_cache)

    def close(self) -> None:
        """Stop the engine and free its cache; pending requests raise `ModelError`. May be called again."""
        atexit.unregister(self.close)
        self._post(self._stop, or_raise=False)
        self._thread.join()

    def _request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        deliver: Callable[[Completion | ModelError], None],
        stops: Callable[[Sequence[int]], bool] | None,
    ) -> Request:
        _check_params(params)
        ids = np.asarray(prompt_ids, dtype=np.int64)
        if ids.ndim != 1 or len(ids) == 0:
            raise ModelError(f"a prompt is a list of at least one token id, got shape {ids.shape}")
        if len(ids) >= self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, and max_model_len={self._max_model_len} leaves no room for an "
                "answer; shorten the prompt or raise max_model_len"
            )
        if ids.min() < 0 or ids.max() >= self._forward.vocab_size:
            raise ModelError(
                f"the prompt has token ids from {ids.min()} to {ids.max()}, the model knows 0 to "
                f"{self._forward.vocab_size - 1}; is the tokenizer the model's own?"
            )
        max_len = min(len(ids) + params.max_tokens, self._max_model_len)
        return Request(ids.tolist(), len(ids), max_len, params, deliver, stops)

    def _post(self, command: Callable[[], None], *, or_raise: bool = True) -> None:
        """Have the worker run `command` between two steps."""
        with self._lock:
            if self._failure is None:
                self._inbox.put(command)
            elif or_raise:
                raise ModelError(str(self._failure)) from self._failure.__cause__

    def _stop(self) -> None:
        self._closing = True

    def _start_worker(self) -> None:
        threads = torch.get_num_threads()
        started: Future[None] = Future()
        self._inbox.put(partial(started.set_result, None))
        self._thread.start()
        started.result()
        # A thread's own setting is also what threads made later begin with: put that back.
        torch.set_num_threads(threads)

    def _run(self, one_thread: bool) -> None:
        """The worker: the only thread that touches scheduler, forward and cache."""
        # Asking first matters: a thread takes over the process-wide number when it first asks, at the latest
        # in its first operation, even where it has set one of its own.
        if one_thread and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        failure = ModelError("the engine is closed; requests must end before close()")
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._take_commands()
                    if self._updates and self._scheduler.in_flight == 0:
                        self._apply(self._updates[0])
                        self._updates.popleft()
                    self._scheduler.step(admit=not self._updates)
        except Exception as error:
            failure = ModelError(f"the embedded engine broke: {type(error).__name__}: {error}; make a new one")
            failure.__cause__ = error
        self._fail(failure)

    def _take_commands(self) -> None:
        """Run what is in the inbox; wait for it where there is nothing else to do."""
        busy = self._scheduler.in_flight or self._scheduler.num_waiting or self._updates
        if not busy:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _free_cache(self) -> None:
        if self._scheduler.in_flight == 0:
            self._scheduler.forget_cache()

    def _apply(self, update: _WeightUpdate) -> None:
        try:
            self._forward.load(update.weights)
        except ModelError as error:
            update.done.set_exception(error)
            return
        self._scheduler.forget_cache()
        self._scheduler.policy_version = update.policy_version
        update.done.set_result(None)

    def _fail(self, failure: ModelError) -> None:
        """End everything that waits, now and in future, with `failure`."""
        with self._lock:
            self._failure = failure
        # First clear a state that may be broken, then see to what came too late.
        self._scheduler.fail_all(failure)
        while not self._inbox.empty():
            self._inbox.get()()
        for update in self._updates:
            update.done.set_exception(failure)
        self._scheduler.fail_all(failure)


def _deliver(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Completion], result: Completion | ModelError
) -> None:
    """Hand a result over to the event loop that waits for it."""
    # It raises where the loop was closed meanwhile: whoever asked is gone.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, answer, result)


def _settle(answer: asyncio.Future[Completion], result: Completion | ModelError) -> None:
    if answer.done():
        return  # Cancelled meanwhile.
    if isinstance(result, ModelError):
        # A new one for each waiter: tracebacks would pile up on a shared one.
        error = ModelError(str(result))
        error.__cause__ = result.__cause__
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _model_limit(model: PreTrainedModel, max_model_len: int) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions >= max_model_len:
        return max_model_len
    logger.info("max_model_len={} is more than the model's {} positions; using the latter", max_model_len, positions)
    return positions


def _check_params(params: SamplingParams) -> None:
    for name, value, fits, expected in (
        ("temperature", params.temperature, 0 <= params.temperature < math.inf, "a finite number, at least 0"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k, params.top_k == -1 or params.top_k > 0, "-1 or at least 1"),
        ("max_tokens", params.max_tokens, params.max_tokens > 0, "at least 1"),
    ):
        if not fits:
            raise ModelError(f"SamplingParams.{name} must be {expected}, got {value!r}")
