"""Packing stores every distinct prefix once, and every sequence can be reproduced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.context_tracker.packing import encode_ids, pack_encoded, pack_separate


def packed_ids(sequences):
    return pack_encoded([encode_ids(sequence) for sequence in sequences])


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@given(sequences)
def test_every_prefix_is_stored_once(sequences: list[list[int]]):
    packing = packed_ids(sequences)
    prefixes = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert len(packing.token_ids) == len(prefixes)
    node_of: dict[tuple[int, ...], int] = {}
    for sequence, places in zip(sequences, packing.places, strict=True):
        assert packing.token_ids[places].tolist() == sequence
        assert packing.positions[places].tolist() == list(range(len(sequence)))
        for end, node in enumerate(places.tolist()):
            assert node_of.setdefault(tuple(sequence[: end + 1]), node) == node


@given(sequences)
def test_ancestors_and_pieces_agree_with_the_parents(sequences: list[list[int]]):
    packing = packed_ids(sequences)
    parents = packing.parents.tolist()
    paths = []
    for node in range(len(parents)):
        path = [node]
        while (parent := parents[path[-1]]) >= 0:
            path.append(parent)
        paths.append(path[::-1])
    for node, path in enumerate(paths):
        by_ends = [i for i, end in enumerate(packing.subtree_ends.tolist()) if i <= node < end]
        assert by_ends == path
    assert [i for piece in packing.pieces for i in range(piece.start, piece.end)] == list(range(len(parents)))
    for piece in packing.pieces:
        before = [node for start, end in piece.path for node in range(start, end)]
        assert [*before, *range(piece.start, piece.end)] == paths[piece.end - 1]
        assert piece.depth == len(before)


def test_longest_sequence_is_one_piece():
    packing = packed_ids([[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6, 6], [9]])
    assert packing.token_ids.tolist() == [1, 2, 5, 6, 6, 3, 4, 9]
    assert [(p.start, p.end, p.path) for p in packing.pieces] == [
        (0, 5, ()),
        (5, 7, ((0, 2),)),
        (7, 8, ()),
    ]
    assert packing.parents.tolist() == [-1, 0, 1, 2, 3, 1, 5, -1]
    assert packing.subtree_ends.tolist() == [7, 7, 5, 5, 5, 7, 7, 8]
    np.testing.assert_array_equal(packing.places[1], [0, 1, 2])


def test_siblings_of_similar_length_are_batched():
    packing = packed_ids([[1, 2, 3, 3, 3, 3], [1, 2, 4, 4, 4, 4], [1, 2, 5, 5, 5], [1, 2, 6], [7, 7]])
    sizes = [[packing.pieces[index].size for index in batch] for batch in packing.batches]
    assert sizes == [[6], [2], [4, 3], [1]]
    assert sorted(index for batch in packing.batches for index in batch) == list(range(len(packing.pieces)))


def test_sequences_are_packed_separately():
    sequences = [[1, 2, 3], [1, 2], [1, 2, 3]]
    packing = pack_separate([encode_ids(sequence) for sequence in sequences])
    assert packing.token_ids.tolist() == [1, 2, 3, 1, 2, 1, 2, 3]
    assert packing.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert packing.subtree_ends.tolist() == [3, 3, 3, 5, 5, 8, 8, 8]
    assert packing.parents.tolist() == [-1, 0, 1, -1, 3, -1, 5, 6]
    assert [places.tolist() for places in packing.places] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    with pytest.raises(ValueError, match="at least one token"):
        pack_separate([encode_ids([1]), b""])


def test_empty_sequence_is_an_error():
    with pytest.raises(ValueError, match="at least one token"):
        packed_ids([[1], []])
