from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.llm_engine.embedded.forward import KvShape
from astuner.llm_engine.embedded.kv_store import MIN_CAPACITY, KvStore
from astuner.llm_engine.embedded.request import Request
from astuner.schema import SamplingParams
from tests.examples import examples

SHAPE = KvShape(2, 1, 3, torch.float32, torch.device("cpu"))
MAX_LEN = 1500
PLENTY = 10**9


def request(length):
    return Request([0] * length, length, MAX_LEN, SamplingParams(), lambda result: None)


def prefix(length, value):
    return torch.full((2, 1, length, 3), float(value))


steps = st.lists(
    st.tuples(st.sampled_from(["place", "grow", "release", "fill with NaN"]), st.integers(0, 20), st.integers(1, 700)),
    max_size=40,
)


@given(steps=steps, budget=st.sampled_from([3000, PLENTY]))
@settings(max_examples=examples(100), deadline=None)
def test_lanes_keep_their_contents(steps, budget):
    store = KvStore(SHAPE, 8, MAX_LEN, budget)
    placed: dict[Request, tuple[int, int]] = {}
    for number, (kind, pick, size) in enumerate(steps):
        picked = list(placed)[pick % len(placed)] if placed else None
        if kind == "place" and len(placed) < 8:
            new = request(size)
            if store.place(new, [prefix(size // 2, number), prefix(size - size // 2, number)]):
                placed[new] = (size, number)
        elif kind == "grow" and picked is not None:
            more = min(size, MAX_LEN - len(picked.tokens))
            picked.tokens.extend([0] * more)
            if not store.make_room(picked):
                del picked.tokens[len(picked.tokens) - more :]
        elif kind in ("release", "fill with NaN") and picked is not None:
            if kind == "fill with NaN":
                store.lane(picked)[..., : len(picked.tokens), :] = torch.nan
            store.release(picked, may_have_nan=kind == "fill with NaN")
            del placed[picked]
        assert len(store) == len(placed)
        for owner, (length, value) in placed.items():
            lane = store.lane(owner)
            assert lane.shape[-2] >= len(owner.tokens)
            assert bool((lane[..., :length, :] == value).all())
        for slab in store.slabs:
            # Masked positions may have any values except NaN.
            assert bool(slab.kv.isfinite().all())
        assert store.allocated_tokens <= max(budget, 3 * MAX_LEN)


def test_memory_is_proportional_to_the_lengths():
    store = KvStore(SHAPE, 64, 100_000, PLENTY)
    requests = [request(20) for _ in range(64)]
    for i, each in enumerate(requests):
        assert store.place(each, [], requests[i + 1 :])
    assert store.allocated_tokens == 64 * MIN_CAPACITY
    requests[0].tokens.extend([0] * 9000)
    assert store.make_room(requests[0])
    # A long request does not enlarge the lanes of the others.
    assert store.allocated_tokens == 64 * MIN_CAPACITY + 16384
    store.clear()
    assert store.allocated_tokens == 0


def test_free_lanes_are_released_before_a_request_is_rejected():
    store = KvStore(SHAPE, 8, MAX_LEN, 4 * MIN_CAPACITY)
    first, second, third = (request(20) for _ in range(3))
    assert all(store.place(each, []) for each in (first, second, third))
    assert store.allocated_tokens == 4 * MIN_CAPACITY
    store.release(third)
    assert not store.place(request(1000), [])
    assert store.allocated_tokens == 4 * MIN_CAPACITY
    assert store.place(request(400), [])
    assert store.allocated_tokens == 4 * MIN_CAPACITY


def test_a_lone_request_may_exceed_the_budget():
    store = KvStore(SHAPE, 8, MAX_LEN, 10)
    alone = request(20)
    assert store.place(alone, [])
    assert not store.place(request(20), [])
    alone.tokens.extend([0] * 1400)
    assert store.make_room(alone)
