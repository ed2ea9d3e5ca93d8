"""Packed sequences equal tuples, and share their storage."""

from __future__ import annotations

import json
import pickle
import random
from array import array

import numpy as np
import pytest
import torch

from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Completion, Packed, concatenate, pack_floats, pack_ints, view_of

IDS = array("i", range(100, 120))


def sequences() -> list[tuple[Packed[int], tuple[int, ...]]]:
    return [
        (Packed(), ()),
        (pack_ints([5]), (5,)),
        (Packed([(IDS, 3, 9)]), tuple(range(103, 109))),
        (Packed([(IDS, 3, 9), (IDS, 9, 11), (7, 0, 3), (7, 0, 2)]), (*range(103, 111), 7, 7, 7, 7, 7)),
        (Packed([(range(10), 0, 4)]), (0, 1, 2, 3)),
        (Packed([(range(10), 2, 4), (IDS, 0, 2), (array("q", [2**40]), 0, 1)]), (2, 3, 100, 101, 2**40)),
    ]


@pytest.mark.parametrize(("packed", "numbers"), sequences())
def test_sequence_equals_the_tuple_of_its_numbers(packed: Packed[int], numbers: tuple[int, ...]):
    assert (packed, len(packed), hash(packed), repr(packed)) == (numbers, len(numbers), hash(numbers), repr(numbers))
    assert numbers == packed
    assert packed != (*numbers, 1)
    assert tuple(packed) == numbers
    assert {packed: 1}[numbers] == 1  # type: ignore[index]
    one = (1,)
    assert (packed + one, one + packed, packed + packed) == (numbers + one, one + numbers, numbers * 2)
    assert (7 in packed, packed.count(7)) == (7 in numbers, numbers.count(7))
    assert np.asarray(packed).tolist() == torch.tensor(packed).tolist() == list(numbers)
    assert json.dumps(to_jsonable({"ids": packed}, str)) == json.dumps({"ids": numbers})
    for copied in (pickle.loads(pickle.dumps(packed)), pack_ints(numbers) if 2**40 not in numbers else packed):
        assert copied == packed
        assert copied == numbers


@pytest.mark.parametrize(("packed", "numbers"), sequences())
def test_parts_are_those_of_the_tuple(packed: Packed[int], numbers: tuple[int, ...]):
    bounds = [None, *range(-len(numbers) - 2, len(numbers) + 3)]
    for start in bounds:
        for end in bounds:
            assert packed[start:end] == numbers[start:end]
            assert packed[start:end:2] == numbers[start:end:2]
    for start in range(len(numbers) + 2):
        for end in range(len(numbers) + 2):
            assert view_of(packed, start, end) == packed.view(start, end) == numbers[start:end]
    assert [packed[index] for index in range(-len(numbers), len(numbers))] == [*numbers, *numbers]
    for index in (len(numbers), -len(numbers) - 1):
        with pytest.raises(IndexError, match=f"out of range for {len(numbers)} numbers"):
            packed[index]


def test_sequences_share_their_storage_also_after_pickling():
    ids = array("i", range(50_000))
    prompts = [Packed[int]([(ids, 0, 100 * number)]) for number in range(1, 500)]
    data = pickle.dumps(prompts)
    assert len(data) < 5 * len(ids)
    copies = pickle.loads(data)
    assert copies == prompts
    assert len({id(part[0]) for prompt in copies for part in prompt.parts()}) == 1
    assert len(list(prompts[3].concatenate(Packed([(ids, 400, 600)])).parts())) == 1


def test_logprobs_take_four_bytes_only_if_this_changes_none_of_them():
    exact = [-0.5, -1.25, 0.0, float("-inf")]
    rounded = [-0.1, *exact]
    for values, code in ((exact, "f"), (rounded, "d")):
        packed = pack_floats(values)
        assert [source.typecode for source, _, _ in packed.parts()] == [code]
        assert list(packed) == values
    mixed = concatenate(pack_floats(exact), Packed([(0.0, 0, 3)])).concatenate(pack_floats(rounded))  # type: ignore[union-attr]
    assert mixed == (*exact, 0.0, 0.0, 0.0, *rounded)


def test_tokens_of_calls_are_stored_once():
    from astuner.model_tuner.history import TokenStore

    random_numbers = random.Random(1)
    tokens = TokenStore()
    contexts: list[tuple[int, ...]] = [(), (9,)]
    stored = []
    for number in range(60):
        base = contexts[-1] if number % 7 else random_numbers.choice(contexts[-5:])
        cut = base[: random_numbers.randrange(len(base) + 1)] if number % 5 == 0 else base
        prompt = (*cut, *(random_numbers.randrange(1000) for _ in range(random_numbers.randrange(5))))
        answer = tuple(random_numbers.randrange(1000) for _ in range(random_numbers.randrange(1, 5)))
        logprobs = tuple(-random_numbers.random() if number % 2 else -0.5 for _ in answer)
        stored.append((tokens.add(prompt, Completion(answer, logprobs, "stop")), (prompt, answer, logprobs, ())))
        contexts.append(prompt + answer)
    for result, expected in stored:
        assert tuple(result) == expected
    # Agents that take turns extend their own context.
    turns = TokenStore()
    own: list[tuple[int, ...]] = [(1,) * 40, (2,) * 40, (3,) * 40]
    results = []
    for number in range(30):
        agent = number % 3
        prompt = (*own[agent], number)
        results.append(turns.add(prompt, Completion((number, 4), (-0.5, -0.5), "stop")))
        own[agent] = (*prompt, number, 4)
    arrays = {id(source): source for result in results for source, _, _ in result.prompt_ids.parts()}
    assert sum(map(len, arrays.values())) == 3 * 40 + 30 * 3
