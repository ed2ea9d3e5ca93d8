from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.llm_engine.embedded.kv_store import PrefixTree
from tests.examples import examples

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=30)


def cache_of(ids):
    """Return a fake cache in which the value of each token is a hash of its prefix."""
    hashes = torch.tensor([hash(tuple(ids[: i + 1])) % 10**6 for i in range(len(ids))], dtype=torch.float64)
    return hashes[None, None, :, None].expand(2, 3, -1, 4)


def insert(tree, ids):
    read_spans = []

    def read(start, stop):
        read_spans.append((start, stop))
        return cache_of(ids)[..., start:stop, :].clone()

    tree.insert(ids, read)
    return read_spans


def matched(tree, ids):
    pieces = tree.match(ids)
    return torch.cat(pieces, dim=-2) if pieces else torch.zeros(2, 3, 0, 4, dtype=torch.float64)


def common(a, b):
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return size


@given(stored=sequences, query=st.lists(st.integers(0, 2), max_size=14))
@settings(max_examples=examples(200), deadline=None)
def test_finds_the_longest_cached_prefix(stored, query):
    tree = PrefixTree(10_000)
    for ids in stored:
        insert(tree, ids)
    longest = max(common(ids, query) for ids in stored)
    assert torch.equal(matched(tree, query), cache_of(query)[..., :longest, :])
    prefixes = {tuple(ids[: i + 1]) for ids in stored for i in range(len(ids))}
    assert tree.num_tokens == len(prefixes)


@given(stored=sequences, capacity=st.integers(0, 20))
@settings(max_examples=examples(200), deadline=None)
def test_stays_within_its_capacity_and_exact(stored, capacity):
    tree = PrefixTree(capacity)
    for ids in stored:
        insert(tree, ids)
        assert tree.num_tokens <= capacity
        cache = matched(tree, ids)
        assert torch.equal(cache, cache_of(ids)[..., : cache.shape[-2], :])
        assert cache.shape[-2] == len(ids) or len(ids) > capacity


def test_reads_only_new_positions():
    tree = PrefixTree(100)
    assert insert(tree, [1, 2, 3, 4]) == [(0, 4)]
    assert insert(tree, [1, 2, 3, 4]) == []
    assert insert(tree, [1, 2]) == []
    assert insert(tree, [1, 2, 9]) == [(2, 3)]
    assert tree.num_tokens == 5


def test_the_least_recently_used_are_evicted_first():
    tree = PrefixTree(12)
    insert(tree, [1] * 4)
    insert(tree, [2] * 4)
    insert(tree, [3] * 4)
    tree.match([1] * 4)
    insert(tree, [4] * 4)
    assert len(tree.match([2] * 4)) == 0
    assert matched(tree, [1] * 4).shape[-2] == 4
    assert matched(tree, [4] * 4).shape[-2] == 4


def test_parts_of_a_split_edge_have_separate_memory():
    tree = PrefixTree(100)
    insert(tree, [1, 2, 3, 4])
    insert(tree, [1, 2, 9])
    sizes = [piece.untyped_storage().nbytes() // piece.element_size() for piece in tree.match([1, 2, 3, 4])]
    assert sizes == [2 * 2 * 3 * 4] * 2


def test_clear():
    tree = PrefixTree(100)
    insert(tree, [1, 2])
    tree.clear()
    assert tree.match([1, 2]) == []
    assert tree.num_tokens == 0
