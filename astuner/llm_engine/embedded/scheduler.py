"""The scheduler of the embedded engine: continuous batching with prefix caching.

A request waits until it gets a lane, into which the longest cached prefix of its prompt is copied. All prompt tokens
but the last are then computed in chunks, packed with those of other requests (prefill). After that, the request takes
part in every decode step until it ends; the first one computes the last prompt token. Its lane is then freed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from astuner.errors import ModelError
from astuner.llm_engine.embedded.forward import Forward, LaneGroup, PrefillChunk
from astuner.llm_engine.embedded.kv_store import KvStore, PrefixTree
from astuner.llm_engine.embedded.request import Request
from astuner.llm_engine.embedded.sampling import BatchSampler
from astuner.schema import Completion

# Tokens per prefill pass: enough to keep the processor busy, few enough to bound the memory of activations. On a CPU,
# the C library gives the memory of larger activations back to the operating system. Allocating it again in the next
# layer costs time.
PREFILL_TOKENS, PREFILL_TOKENS_CPU = 4096, 1024
# Prompts with this many equal tokens after the cached prefix are compared further, see `_worth_waiting_for`.
_ALIKE_TOKENS = 16

# With a shorter common prefix or fewer lanes, separate attention to the prefix costs more than it saves.
_SHARED_TOKENS, _SHARED_LANES = 16, 4
# Up to this size, idle lanes stay allocated: allocating memory costs more time than writing to it.
_IDLE_BYTES = 64 * 2**20

_PrefixKey = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        prompt_tokens: prompt tokens of the admitted requests.
        reused_tokens: number of those that were copied from the prefix cache.
        sampled_tokens: sampled tokens.
        steps: decode steps, each of which samples one token for every running request.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    sampled_tokens: int = 0
    steps: int = 0


class Scheduler:
    """Runs requests on a `Forward`. Not thread-safe: a single thread calls it, in inference mode.

    Args:
        forward: forward pass of the model.
        max_model_len: maximum number of tokens in a request.
        max_num_seqs: maximum number of concurrent requests.
        lane_tokens: memory of running requests, in tokens; see `KvStore`.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_model_len: int,
        max_num_seqs: int,
        prefix_cache_tokens: int,
        lane_tokens: int,
    ) -> None:
        self.policy_version = 0
        self._forward = forward
        self._max_num_seqs = max_num_seqs
        self._has_cache = prefix_cache_tokens > 0
        self._tree = PrefixTree(prefix_cache_tokens)
        self._prefill_tokens = PREFILL_TOKENS_CPU if forward.kv_shape.device.type == "cpu" else PREFILL_TOKENS
        self._store = KvStore(forward.kv_shape, max_num_seqs, max_model_len, lane_tokens)
        # All requests without a result, so that `fail_all` reaches every one in any state.
        self._open: set[Request] = set()
        self._waiting: deque[Request] = deque()
        # Requests that lost their lane because memory was short. They are admitted before the waiting ones.
        self._preempted: deque[Request] = deque()
        self._prefilling: dict[Request, int] = {}
        self._prefilling_alike: dict[_PrefixKey, Request] = {}
        self._running: list[Request] = []
        # Both depend on the set of running requests, and are recreated when it changes.
        self._sampler: BatchSampler | None = None
        self._shared: list[int] = []
        self.stats = EngineStats()

    @property
    def in_flight(self) -> int:
        """Number of requests that have started and not ended."""
        return len(self._running) + len(self._prefilling) + len(self._preempted)

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Its prompt must be shorter than `max_model_len`."""
        self._open.add(request)
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request without a result and free its lane. No-op if it has ended."""
        self._open.discard(request)
        for queue in (self._waiting, self._preempted):
            if request in queue:
                queue.remove(request)
        if self._prefilling.pop(request, None) is not None:
            self._prefilling_alike = {key: r for key, r in self._prefilling_alike.items() if r is not request}
            # Its cache has not been checked for NaN.
            self._store.release(request, may_have_nan=True)
        elif request in self._running:
            self._remove(request)

    def fail_all(self, error: ModelError) -> None:
        """End every request with `error`."""
        for request in self._open:
            request.deliver(error)
        for requests in (self._open, self._running, self._prefilling, self._preempted, self._waiting):
            requests.clear()
        self._sampler = None
        self._tree.clear()
        self._store.clear()

    def clear_cache(self) -> None:
        """Clear the prefix cache, and free idle lanes if they are large. No request may be in flight."""
        assert self.in_flight == 0
        self._tree.clear()
        if self._store.allocated_bytes > _IDLE_BYTES:
            self._store.clear()

    def step(self, *, admit: bool = True) -> None:
        """Compute one prefill pass, or else one token for each running request.

        Args:
            admit: whether waiting requests may start. Preempted requests may always resume.
        """
        if admit or self._preempted:
            self._admit(self._preempted if self._preempted else self._waiting)
        if self._prefilling:
            self._prefill()
        elif self._running:
            self._decode()

    def _admit(self, queue: deque[Request]) -> None:
        """Assign lanes to requests of `queue`, in order, while there are lanes and memory."""
        postponed: list[Request] = []
        while queue and len(self._store) < self._max_num_seqs:
            request = queue.popleft()
            prefix = self._tree.match(request.tokens[:-1])
            start = sum(piece.shape[-2] for piece in prefix)
            alike = (start, tuple(request.tokens[start : start + _ALIKE_TOKENS]))
            if self._has_cache and self._worth_waiting_for(self._prefilling_alike.get(alike), request, start):
                postponed.append(request)
                continue
            if not self._store.place(request, prefix, queue):
                queue.appendleft(request)
                break
            if not request.logprobs:
                self.stats.prompt_tokens += request.prompt_len
                self.stats.reused_tokens += start
            if start == len(request.tokens) - 1:
                self._start_decoding([request])
            else:
                self._prefilling[request] = start
                self._prefilling_alike.setdefault(alike, request)
        queue.extendleft(reversed(postponed))

    @staticmethod
    def _worth_waiting_for(other: Request | None, request: Request, start: int) -> bool:
        """Return whether `other`, now in prefill, computes at least half of the request's tokens from `start` on."""
        if other is None:
            return False
        half = start + (len(request.tokens) - start + 1) // 2
        return half <= len(other.tokens) and other.tokens[:half] == request.tokens[:half]

    def _prefill(self) -> None:
        """Compute one pass over the requests in prefill, in the order of their admission."""
        chunks: list[PrefillChunk] = []
        room = self._prefill_tokens
        for request, start in self._prefilling.items():
            if room == 0:
                break
            stop = min(len(request.tokens) - 1, start + room)
            chunks.append(PrefillChunk(self._store.lane(request), request.tokens[start:stop], start))
            self._prefilling[request] = stop
            room -= stop - start
        self._forward.extend(chunks)
        filled = [request for request, stop in self._prefilling.items() if stop == len(request.tokens) - 1]
        for request in filled:
            del self._prefilling[request]
            self._cache_prefix(request)
        self._prefilling_alike = {key: r for key, r in self._prefilling_alike.items() if r in self._prefilling}
        self._start_decoding(filled)

    def _decode(self) -> None:
        """Sample one token for every running request."""
        self._grow_lanes()
        slabs = self._store.slabs
        requests = [request for slab in slabs for request in slab.requests]
        if self._sampler is None:
            self._sampler = BatchSampler(requests, self._forward.kv_shape.device)
            self._shared = [_shared_prefix_length(slab.requests) for slab in slabs]
        groups = [
            LaneGroup(slab.kv[:, : len(slab.requests)], [request.tokens for request in slab.requests], shared)
            for slab, shared in zip(slabs, self._shared, strict=True)
        ]
        tokens = self._sampler.sample(self._forward.decode(groups))
        for request, token in zip(requests, tokens, strict=True):
            request.append(token)
        self.stats.steps += 1
        self.stats.sampled_tokens += len(requests)
        self._deliver_finished(requests)

    def _deliver_finished(self, requests: Sequence[Request]) -> None:
        # In reverse order: freeing a lane moves the last lane, which would be wasted if that request ends as well.
        for request in reversed(requests):
            if not math.isfinite(request.logprobs[-1]):
                self._remove(request, may_have_nan=True)
                error = (
                    f"the model's logits are not finite after {len(request.tokens) - 1} tokens (policy version "
                    f"{self.policy_version}); the weights have diverged, or their dtype overflows"
                )
                self._deliver(request, ModelError(error))
            elif request.grammar is not None and request.grammar.failure is not None:
                self._remove(request)
                assert request.params.constraint is not None
                error = (
                    f"the {request.params.constraint.parameter} of a request cannot be enforced after "
                    f"{len(request.logprobs) - 1} tokens: {request.grammar.failure}; use a simpler JSON schema"
                )
                self._deliver(request, ModelError(error))
            elif (reason := request.finish_reason) is not None:
                self._cache_prefix(request)
                self._remove(request)
                self._deliver(request, request.completion(reason, self.policy_version))

    def _deliver(self, request: Request, result: Completion | ModelError) -> None:
        self._open.remove(request)
        request.deliver(result)

    def _grow_lanes(self) -> None:
        """Make room for the next token of every running request. Preempt the most recent ones if memory is short."""
        outgrown = [r for slab in self._store.slabs for r in slab.requests if len(r.tokens) > slab.capacity]
        for request in outgrown:
            while request in self._running and not self._store.make_room(request):
                youngest = self._running[-1]
                self._cache_prefix(youngest)
                self._remove(youngest)
                self._preempted.appendleft(youngest)
        if outgrown:
            self._sampler = None

    def _start_decoding(self, requests: Iterable[Request]) -> None:
        self._running.extend(requests)
        self._sampler = None

    def _remove(self, request: Request, *, may_have_nan: bool = False) -> None:
        self._running.remove(request)
        self._store.release(request, may_have_nan=may_have_nan)
        self._sampler = None

    def _cache_prefix(self, request: Request) -> None:
        """Add the computed tokens of `request` to the prefix cache."""
        lane = self._store.lane(request)
        self._tree.insert(request.tokens[:-1], lambda start, stop: lane[..., start:stop, :].clone())


def _shared_prefix_length(requests: Sequence[Request]) -> int:
    """Return the length of the requests' common cached prefix; 0 if it is too short or the requests are too few."""
    if len(requests) < _SHARED_LANES:
        return 0
    cached = [request.tokens[:-1] for request in requests]
    # In lexicographic order, the common prefix of the first and the last is common to all.
    first, last = min(cached), max(cached)
    shared = next((index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return shared if shared >= _SHARED_TOKENS else 0
