"""The embedded engine: an asynchronous interface to a worker thread that owns the model."""

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
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from astuner.errors import ModelError
from astuner.llm_engine.context_length import context_length
from astuner.llm_engine.embedded import fast_forward
from astuner.llm_engine.embedded.fallback_forward import UncachedFallback, fallback_forward
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.llm_engine.embedded.forward import Forward
from astuner.llm_engine.embedded.kv_store import default_lane_tokens, default_prefix_cache_tokens
from astuner.llm_engine.embedded.request import GrammarCompiler, Request
from astuner.llm_engine.embedded.scheduler import EngineStats, Scheduler
from astuner.llm_engine.protocol import answer_room, reject_unsupported
from astuner.llm_engine.stop_strings import StopStrings
from astuner.llm_engine.weight_digests import weight_digests
from astuner.schema import Completion, SamplingParams

# On a CPU, the operations of smaller models take about 50 µs each. A second thread then gains a third on an idle
# machine, nothing if the agents need the other core, and is much slower on an overloaded machine.
_ONE_THREAD_PARAMETERS = 5_000_000


@dataclass(frozen=True, slots=True)
class _WeightUpdate:
    weights: Mapping[str, Tensor]
    policy_version: int
    done: Future[None]


class EmbeddedEngine:
    """Samples from a transformers model in this process, with continuous batching and prefix caching.

    Llama, Qwen2 and Qwen3 models run on astuner's own forward pass, all others on transformers'. Device and dtype are
    those of the model.

    The engine may write to `model` (see `update_weights`), and sets it to evaluation mode if it uses transformers'
    forward pass. If the model is also trained, pass a copy, unless `update_weights` only ever receives the state dict
    of this same model.

    Memory: the running requests' KV cache grows with their lengths (within a factor of four, because lengths and lane
    counts are rounded up), to at most half the memory that is free when the engine is created. Beyond that, the most
    recent requests are preempted and recomputed later. The prefix cache is additional.

    Args:
        model: any `AutoModelForCausalLM`.
        max_model_len: maximum number of tokens in a request, prompt and completion together; lowered to the model's
            `max_position_embeddings`.
        max_num_seqs: maximum number of concurrent requests.
        prefix_cache_tokens: capacity of the prefix cache; by default 1024 × `max_num_seqs`, but at most an eighth of
            the free memory. 0 disables prefix caching.
        tokenizer: the model's tokenizer. Without it, completions do not end at stop strings, and constraints are
            errors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        max_num_seqs: int = 64,
        prefix_cache_tokens: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.max_model_len = min(max_model_len, context_length(model.config) or max_model_len)
        self._forward: Forward = (
            FastForward(model, self.max_model_len) if fast_forward.supports(model) else fallback_forward(model)
        )
        if isinstance(self._forward, UncachedFallback):
            prefix_cache_tokens = 0  # there is no KV cache
        elif prefix_cache_tokens is None:
            prefix_cache_tokens = default_prefix_cache_tokens(self._forward.kv_shape, max_num_seqs)
        self._scheduler = Scheduler(
            self._forward,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            prefix_cache_tokens=prefix_cache_tokens,
            lane_tokens=default_lane_tokens(self._forward.kv_shape, max_num_seqs, self.max_model_len),
        )
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, self._forward.vocab_size)
        self._updates: deque[_WeightUpdate] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Orders failure and `_post`: no command is added to the inbox after it was drained for the last time.
        self._lock = threading.Lock()
        self._failure: ModelError | None = None
        self._closing = False
        small = self._forward.kv_shape.device.type == "cpu" and model.num_parameters() < _ONE_THREAD_PARAMETERS
        self._thread = threading.Thread(target=self._run, args=(small,), name="embedded-engine", daemon=True)
        threads = torch.get_num_threads()
        started: Future[None] = Future()
        self._inbox.put(partial(started.set_result, None))
        self._thread.start()
        started.result()
        # The worker's setting also becomes the default of new threads: restore it.
        torch.set_num_threads(threads)
        # A daemon thread must not run a tensor operation while the interpreter shuts down.
        atexit.register(self.close)

    @property
    def policy_version(self) -> int:
        """Version of the weights that new requests are sampled with."""
        return self._scheduler.policy_version

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return replace(self._scheduler.stats)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion (see `LlmEngine.generate`). Cancelling the coroutine cancels the request.

        With a seed, random draws do not depend on concurrent requests; logits may, by rounding.
        """
        with_tokenizer = ("response_format", "tool_choice") if self._tokenizer is not None else ()
        supported = ("presence_penalty", "frequency_penalty", "top_logprobs", *with_tokenizer)
        reject_unsupported(params, "the embedded engine without a tokenizer", supported=supported)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()

        def deliver(result: Completion | ModelError) -> None:
            # Raised if the loop has been closed, so that nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result)

        request = self._request(prompt_ids, params, deliver)
        self._post(partial(self._scheduler.submit, request))
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(partial(self._scheduler.cancel, request), or_raise=False)
            raise

    def update_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> None:
        """Load new weights and block until they are in use.

        Running requests finish with the old weights first; waiting requests use the new ones. The prefix cache is
        cleared.

        Args:
            state_dict: all of the model's weights under the model's names, with adapters merged; tied weights may
                appear under any one of their names. The engine does not change it, and it must not change during
                the call.
            policy_version: policy version of subsequent completions.

        Raises:
            ModelError: names, shapes or ties do not fit, in which case the old weights stay; or the engine is closed
                or has failed.
        """
        update = _WeightUpdate(state_dict, policy_version, Future())
        self._post(partial(self._updates.append, update))
        update.done.result()

    def weight_digests(self) -> dict[str, int]:
        """Return the checksums of the weights that it samples with; see `llm_engine.weight_digests`.

        Raises:
            ModelError: the engine is closed or has failed.
        """
        digests: Future[dict[str, int]] = Future()
        self._post(lambda: digests.set_result(weight_digests(self._forward.weights())))
        return digests.result()

    def raise_if_broken(self) -> None:
        """Raise an exception if the engine can no longer serve requests.

        Raises:
            ModelError: the engine is closed or has failed. The message includes the cause.
        """
        with self._lock:
            if self._failure is not None:
                raise ModelError(str(self._failure)) from self._failure.__cause__

    def free_cache(self) -> None:
        """Release the memory that the prefix cache and idle lanes take, if it is large and no request is running."""

        def free() -> None:
            if self._scheduler.in_flight == 0:
                self._scheduler.clear_cache()

        self._post(free)

    def close(self) -> None:
        """Stop the engine and free its cache. Pending requests raise `ModelError`. May be called repeatedly."""
        atexit.unregister(self.close)
        self._post(partial(setattr, self, "_closing", True), or_raise=False)
        self._thread.join()

    def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, deliver: Callable[[Completion | ModelError], None]
    ) -> Request:
        for name, value, fits, expected in (
            ("temperature", params.temperature, 0 <= params.temperature < math.inf, "a finite number, at least 0"),
            ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
            ("top_k", params.top_k, params.top_k == -1 or params.top_k > 0, "-1 or at least 1"),
            ("max_tokens", params.max_tokens, params.max_tokens > 0, "at least 1"),
        ):
            if not fits:
                raise ModelError(f"SamplingParams.{name} must be {expected}, got {value!r}")
        ids = np.asarray(prompt_ids, dtype=np.int64)
        if ids.ndim != 1 or len(ids) == 0:
            raise ModelError(f"a prompt must be a list of at least one token id, got shape {ids.shape}")
        room = answer_room(len(ids), self.max_model_len)
        if ids.min() < 0 or ids.max() >= self._forward.vocab_size:
            raise ModelError(
                f"the prompt has token ids from {ids.min()} to {ids.max()}, but the model's are 0 to "
                f"{self._forward.vocab_size - 1}; does the tokenizer belong to the model?"
            )
        max_len = len(ids) + min(params.max_tokens, room)
        stops = StopStrings(params.stop, self._tokenizer) if params.stop and self._tokenizer is not None else None
        grammar = None
        if params.constraint is not None:
            grammar = self._grammars.matcher(params.constraint, params.stop_token_ids)
        return Request(ids.tolist(), len(ids), max_len, params, deliver, stops, grammar)

    def _post(self, command: Callable[[], None], *, or_raise: bool = True) -> None:
        """Make the worker run `command` between two steps."""
        with self._lock:
            if self._failure is None:
                self._inbox.put(command)
            elif or_raise:
                raise ModelError(str(self._failure)) from self._failure.__cause__

    def _run(self, one_thread: bool) -> None:
        """Run the worker: the only thread that uses the scheduler, the forward pass and the cache."""
        # Call get_num_threads first: on its first call or operation, a thread adopts the process-wide number, which
        # would override a number that it has set before.
        if one_thread and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        failure = ModelError("the engine is closed; requests must end before close()")
        try:
            with torch.inference_mode():
                while not self._closing:
                    if not (self._scheduler.in_flight or self._scheduler.num_waiting or self._updates):
                        self._inbox.get()()  # there is nothing else to do
                    while not self._inbox.empty():
                        self._inbox.get()()
                    if self._updates and self._scheduler.in_flight == 0:
                        self._apply(self._updates[0])
                        self._updates.popleft()
                    self._scheduler.step(admit=not self._updates)
        except Exception as error:
            failure = ModelError(f"the embedded engine failed: {type(error).__name__}: {error}; create a new engine")
            failure.__cause__ = error
        with self._lock:
            self._failure = failure
        # First clear the state, which may be invalid, then fail what was submitted in the meantime.
        self._scheduler.fail_all(failure)
        while not self._inbox.empty():
            self._inbox.get()()
        for update in self._updates:
            update.done.set_exception(failure)
        self._scheduler.fail_all(failure)

    def _apply(self, update: _WeightUpdate) -> None:
        try:
            self._forward.load(update.weights)
        except ModelError as error:
            update.done.set_exception(error)
            return
        self._scheduler.clear_cache()
        self._scheduler.policy_version = update.policy_version
        update.done.set_result(None)


def _settle(answer: asyncio.Future[Completion], result: Completion | ModelError) -> None:
    if answer.done():
        return  # cancelled in the meantime
    if isinstance(result, ModelError):
        # A new exception for each request: tracebacks would accumulate on a shared one.
        error = ModelError(str(result))
        error.__cause__ = result.__cause__
        answer.set_exception(error)
    else:
        answer.set_result(result)
