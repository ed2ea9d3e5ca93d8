"""Decides what is computed next: continuous batching with prefix reuse.

A request waits, is given a lane with the longest known prefix of its prompt copied in, has all but the last of its
tokens computed in chunks packed with those of others ("filling"), and then takes part in one decode step after the
other until it ends; the first decode step computes its last prompt token. Its lane is then free for the next.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from astuner.errors import ModelError
from astuner.llm_engine.embedded.forward import Chunk, Forward, LaneGroup
from astuner.llm_engine.embedded.kv_store import KvStore
from astuner.llm_engine.embedded.prefix_tree import PrefixTree
from astuner.llm_engine.embedded.request import Request
from astuner.llm_engine.embedded.sampling import BatchSampler
from astuner.schema import Completion

# Tokens of one prefill pass: enough to keep a processor busy, few enough to bound the activations.
PREFILL_TOKENS = 4096
# Two waiting prompts that go on alike for this many tokens are worth a closer look, see `_worth_waiting_for`.
_ALIKE_TOKENS = 16

# With fewer tokens or lanes in common, attending to them apart from the rest costs more than it saves.
_SHARED_TOKENS, _SHARED_LANES = 16, 4
# Lanes that take no more are kept for the next requests: fresh memory costs more time than writing to it does.
_KEPT_BYTES = 64 * 2**20

_AlikeKey = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine did so far.

    Attributes:
        prompt_tokens: tokens of the prompts that were admitted.
        reused_tokens: how many of them were copied from the prefix cache instead of computed.
        sampled_tokens: tokens sampled.
        steps: decode steps, each one token for all running requests.
        busy_seconds: time spent computing.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    sampled_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0


class Scheduler:
    """Runs requests on a forward. Not thread-safe: one thread calls it, in inference mode.

    Args:
        forward: the model.
        max_model_len: the most tokens of a request.
        max_num_seqs: the most requests computed at once.
        prefix_cache_tokens: capacity of the prefix cache.
        lane_tokens: memory for running requests, in tokens, see `KvStore`.
        policy_version: what completions report as the weights' version.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_model_len: int,
        max_num_seqs: int,
        prefix_cache_tokens: int,
        lane_tokens: int,
        policy_version: int = 0,
    ) -> None:
        self.policy_version = policy_version
        self._forward = forward
        self._max_num_seqs = max_num_seqs
        self._tree = PrefixTree(prefix_cache_tokens)
        self._store = KvStore(forward.kv_shape, max_num_seqs, max_model_len, lane_tokens)
        # Every request without an answer: whatever goes wrong where, none of them is left without one.
        self._open: set[Request] = set()
        self._waiting: deque[Request] = deque()
        # Had to give up their lane for want of memory; they were sampled from, so they go before the waiting ones.
        self._preempted: deque[Request] = deque()
        self._filling: dict[Request, int] = {}
        self._filling_alike: dict[_AlikeKey, Request] = {}
        self._running: list[Request] = []
        # Both belong to the requests that run, and are made anew when those change.
        self._sampler: BatchSampler | None = None
        self._shared: list[int] = []
        self._prompt_tokens = self._reused_tokens = self._sampled_tokens = self._steps = 0
        self._busy_seconds = 0.0

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters; may be read from any thread."""
        return EngineStats(
            self._prompt_tokens, self._reused_tokens, self._sampled_tokens, self._steps, self._busy_seconds
        )

    @property
    def in_flight(self) -> int:
        """Requests that were begun and have not ended."""
        return len(self._running) + len(self._filling) + len(self._preempted)

    @property
    def num_waiting(self) -> int:
        """Requests that were not begun yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must be shorter than `max_model_len`."""
        self._open.add(request)
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request that nobody waits for any more, and free its lane; no-op where it has ended."""
        self._open.discard(request)
        for queue in (self._waiting, self._preempted):
            if request in queue:
                queue.remove(request)
        if self._filling.pop(request, None) is not None:
            self._filling_alike = {key: r for key, r in self._filling_alike.items() if r is not request}
            # Nobody has looked yet at what was computed for it.
            self._store.release(request, spoilt=True)
        elif request in self._running:
            self._leave(request)

    def fail_all(self, error: ModelError) -> None:
        """End every request with `error`."""
        for request in self._open:
            request.deliver(error)
        for requests in (self._open, self._running, self._filling, self._preempted, self._waiting):
            requests.clear()
        self._sampler = None
        self._tree.clear()
        self._store.clear()

    def forget_cache(self) -> None:
        """Drop every cached token and free the memory, if it is any to speak of; nothing may be in flight."""
        assert self.in_flight == 0
        self._tree.clear()
        if self._store.held_bytes > _KEPT_BYTES:
            self._store.clear()

    def step(self, *, admit: bool = True) -> None:
        """Compute one prefill pass, or where nothing is to be filled one token for each running request.

        Args:
            admit: whether waiting requests may begin; those preempted always may go on.
        """
        started = time.perf_counter()
        if admit or self._preempted:
            self._admit(self._preempted if self._preempted else self._waiting)
        if self._filling:
            self._prefill()
        elif self._running:
            self._decode()
        self._busy_seconds += time.perf_counter() - started

    def _admit(self, queue: deque[Request]) -> None:
        """Give lanes to requests of `queue`, in order, while there are lanes and memory."""
        postponed: list[Request] = []
        while queue and len(self._store) < self._max_num_seqs:
            request = queue.popleft()
            prefix = self._tree.match(request.tokens[:-1])
            start = sum(piece.shape[-2] for piece in prefix)
            alike = (start, tuple(request.tokens[start : start + _ALIKE_TOKENS]))
            if self._worth_waiting_for(self._filling_alike.get(alike), request, start):
                postponed.append(request)
                continue
            if not self._store.place(request, prefix, queue):
                queue.appendleft(request)
                break
            if not request.logprobs:
                self._prompt_tokens += request.prompt_len
                self._reused_tokens += start
            if start == len(request.tokens) - 1:
                self._join([request])
            else:
                self._filling[request] = start
                self._filling_alike.setdefault(alike, request)
        queue.extendleft(reversed(postponed))

    @staticmethod
    def _worth_waiting_for(other: Request | None, request: Request, start: int) -> bool:
        """Whether `other`, being filled now, computes at least half of what `request` needs from `start` on."""
        if other is None:
            return False
        half = start + (len(request.tokens) - start + 1) // 2
        return half <= len(other.tokens) and other.tokens[:half] == request.tokens[:half]

    def _prefill(self) -> None:
        """Compute up to PREFILL_TOKENS tokens of the requests that are being filled, first come first."""
        chunks: list[Chunk] = []
        room = PREFILL_TOKENS
        for request, start in self._filling.items():
            if room == 0:
                break
            stop = min(len(request.tokens) - 1, start + room)
            chunks.append(Chunk(self._store.lane(request), request.tokens[start:stop], start))
            self._filling[request] = stop
            room -= stop - start
        self._forward.extend(chunks)
        filled = [request for request, stop in self._filling.items() if stop == len(request.tokens) - 1]
        for request in filled:
            del self._filling[request]
            self._remember(request)
        self._filling_alike = {key: r for key, r in self._filling_alike.items() if r in self._filling}
        self._join(filled)

    def _decode(self) -> None:
        """Sample one token for every running request."""
        self._grow_lanes()
        slabs = self._store.slabs
        requests = [request for slab in slabs for request in slab.requests]
        if self._sampler is None:
            self._sampler = BatchSampler(requests, self._forward.kv_shape.device)
            self._shared = [_shared(slab.requests) for slab in slabs]
        groups = [
            LaneGroup(slab.kv[:, : len(slab.requests)], [request.tokens for request in slab.requests], shared)
            for slab, shared in zip(slabs, self._shared, strict=True)
        ]
        token_ids, logprobs = self._sampler.sample(self._forward.decode(groups))
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            request.tokens.append(token_id)
            request.logprobs.append(logprob)
        self._steps += 1
        self._sampled_tokens += len(requests)
        self._deliver_finished(requests)

    def _deliver_finished(self, requests: Sequence[Request]) -> None:
        # From the last lane on: what leaves a lane before it is replaced by the last, which would be moved for nothing.
        for request in reversed(requests):
            if not math.isfinite(request.logprobs[-1]):
                self._leave(request, spoilt=True)
                self._answer(request, self._not_finite(request))
            elif (reason := request.finish_reason) is not None:
                self._remember(request)
                self._leave(request)
                sampled = tuple(request.tokens[request.prompt_len :])
                self._answer(request, Completion(sampled, tuple(request.logprobs), reason, self.policy_version))

    def _not_finite(self, request: Request) -> ModelError:
        return ModelError(
            f"the model's logits are not finite after {len(request.tokens) - 1} tokens (policy version "
            f"{self.policy_version}); the weights have diverged, or their dtype overflows"
        )

    def _answer(self, request: Request, result: Completion | ModelError) -> None:
        self._open.remove(request)
        request.deliver(result)

    def _grow_lanes(self) -> None:
        """Make room for the next token of every running request; the last to come give way where memory is short."""
        outgrown = [r for slab in self._store.slabs for r in slab.requests if len(r.tokens) > slab.capacity]
        for request in outgrown:
            while request in self._running and not self._store.make_room(request):
                youngest = self._running[-1]
                self._remember(youngest)
                self._leave(youngest)
                self._preempted.appendleft(youngest)
        if outgrown:
            self._sampler = None

    def _join(self, requests: Iterable[Request]) -> None:
        self._running.extend(requests)
        self._sampler = None

    def _leave(self, request: Request, *, spoilt: bool = False) -> None:
        self._running.remove(request)
        self._store.release(request, spoilt=spoilt)
        self._sampler = None

    def _remember(self, request: Request) -> None:
        """Put what is computed of `request` into the prefix cache."""
        lane = self._store.lane(request)
        self._tree.insert(request.tokens[:-1], lambda start, stop: lane[..., start:stop, :].clone())


def _shared(requests: Sequence[Request]) -> int:
    """With how many tokens, all of them in the cache, the requests begin alike; 0 where it is not worth knowing."""
    if len(requests) < _SHARED_LANES:
        return 0
    cached = [request.tokens[:-1] for request in requests]
    # Whatever stands between the first and the last in order begins as both of them do.
    first, last = min(cached), max(cached)
    shared = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return shared if shared >= _SHARED_TOKENS else 0
