"""Merging is exact, independent of order, and trains every token as often as it was sampled."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.context_tracker.audit import certificate, count_tokens
from astuner.context_tracker.merge import build_samples, limit_samples
from astuner.schema import LlmCall, SamplingParams


def call(name: str, prompt: list[int], completion: list[int], logprobs: list[float] | None = None) -> LlmCall:
    return LlmCall(
        call_id=name,
        episode_id="e",
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(logprobs if logprobs is not None else [-0.1 * t for t in completion]),
        finish_reason="stop",
    )


@st.composite
def forests(draw: st.DrawFn) -> list[LlmCall]:
    """Calls that extend, fork, repeat, drift from and truncate one another, of several agents, some not trained.

    Few different tokens, logprobs, rewards and temperatures, so that they collide.
    """
    tokens = st.lists(st.integers(0, 2), min_size=0, max_size=4)
    calls: list[LlmCall] = []
    for index in range(draw(st.integers(0, 8))):
        base: tuple[int, ...] = ()
        if calls and draw(st.booleans()):
            parent = draw(st.sampled_from(calls))
            path = parent.prompt_ids + parent.completion_ids
            base = path[: draw(st.integers(0, len(path)))]
            if base and draw(st.integers(0, 9)) == 0:
                place = draw(st.integers(0, len(base) - 1))
                base = (*base[:place], base[place] ^ 1, *base[place + 1 :])
        completion = draw(tokens)
        logprobs = [draw(st.sampled_from([-1.0, -0.5])) for _ in completion]
        made = call(f"c{index}", [*base, *draw(tokens)], completion, logprobs)
        rewards, trained = st.sampled_from([None, None, 1.0]), st.sampled_from([True, True, True, False])
        temperatures = st.sampled_from([1.0, 1.0, 0.5])
        calls.append(
            replace(
                made,
                agent_name=draw(st.sampled_from("ab")),
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                reward=draw(rewards),
                sampling=SamplingParams(temperature=draw(temperatures)),
                trained=draw(trained),
            )
        )
    return calls


def trained(calls: list[LlmCall]) -> list[LlmCall]:
    return [c for c in calls if c.trained and c.completion_ids]


@given(forests(), st.sampled_from(["leaf", "tree", "none"]), st.randoms())
def test_every_sampled_token_is_trained_once_with_its_logprob(calls, merge, rng: random.Random):
    samples = build_samples(calls, merge)
    assert certificate(calls, samples) == 1.0
    assert sum(sum(s.train_counts) for s in samples) == sum(len(c.completion_ids) for c in trained(calls))
    if samples:
        assert sum(s.weight for s in samples) == pytest.approx(1.0)
    shuffled = list(calls)
    rng.shuffle(shuffled)
    assert build_samples(shuffled, merge) == samples


@given(forests(), st.sampled_from(["leaf", "tree"]))
def test_a_token_is_never_trained_for_two_rewards_or_temperatures_at_once(calls, merge):
    by_id = {c.call_id: c for c in calls}
    for sample in build_samples(calls, merge):
        treatments: dict[int, set[tuple[float | None, float]]] = {}
        for span in sample.spans:
            for place in span.nodes or range(span.start, span.end):
                origin = by_id[span.call_id]
                treatments.setdefault(place, set()).add((origin.reward, origin.sampling.temperature))
        assert all(len(distinct) == 1 for distinct in treatments.values())


@given(forests())
def test_merging_is_idempotent(calls):
    """Merging the calls of a row gives the same row."""
    by_id = {c.call_id: c for c in calls}
    for sample in build_samples(calls):
        (again,) = build_samples([by_id[span.call_id] for span in sample.spans])
        assert replace(again, weight=sample.weight) == sample


@given(forests())
def test_no_leaf_row_is_superfluous(calls):
    """A row is a prefix of another only if they differ in logprobs, or in agent, reward or temperature of a call."""
    treatments = {
        c.call_id: (None if c.reward is None else (c.agent_name, c.reward), c.sampling.temperature) for c in calls
    }
    samples = build_samples(calls)
    for row, other in itertools.permutations(samples, 2):
        if other.token_ids[: len(row.token_ids)] == row.token_ids:
            differing = {treatments[span.call_id] for sample in (row, other) for span in sample.spans}
            assert len(differing) > 1 or any(
                a and b and x != y
                for a, b, x, y in zip(row.train_counts, other.train_counts, row.logprobs, other.logprobs, strict=False)
            )


@given(forests())
def test_tree_has_each_prefix_once(calls):
    samples = build_samples(calls, "tree")
    distinct = count_tokens(trained(calls)).distinct
    assert len(samples) == (distinct > 0)
    for sample in samples:
        assert sample.parents is not None
        assert all(parent < node for node, parent in enumerate(sample.parents))
        # After the trie come copies of tokens that were sampled with several logprobs or rewards; they have no
        # children.
        assert max(sample.parents) < distinct
        kinds = {(parent, token) for parent, token in zip(sample.parents, sample.token_ids, strict=True)}
        assert len(kinds) == distinct
        assert all(
            sample.position_ids[node] == (sample.position_ids[up] + 1 if up >= 0 else 0)
            for node, up in enumerate(sample.parents)
        )


@given(forests())
def test_distinct_tokens_are_trie_nodes(calls):
    nodes = set()
    for c in calls:
        tokens = c.prompt_ids + c.completion_ids
        nodes.update(tokens[:n] for n in range(1, len(tokens) + 1))
    assert count_tokens(calls).distinct == len(nodes)


def test_a_growing_conversation_is_one_row():
    first = call("a", [1, 2], [3, 4])
    second = call("b", [1, 2, 3, 4, 5], [6])
    (sample,) = build_samples([second, first])
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.train_counts == (0, 0, 1, 1, 0, 1)
    assert [span.call_id for span in sample.spans] == ["a", "b"]


def test_tree_keeps_a_token_that_was_sampled_with_two_logprobs():
    calls = [call("a", [1], [2, 3], [-1.0, -2.0]), call("b", [1], [2, 4], [-1.5, -2.5])]
    (tree,) = build_samples(calls, "tree")
    assert tree.token_ids == (1, 2, 3, 4, 2)
    assert tree.parents == (-1, 0, 1, 1, 0)
    assert tree.logprobs == (0.0, -1.0, -2.0, -2.5, -1.5)
    assert [span.nodes for span in tree.spans] == [(1, 2), (4, 3)]


def test_calls_of_frozen_targets_are_context():
    first = replace(call("a", [1, 2], [3, 4]), trained=False)
    (sample,) = build_samples([first, call("b", [1, 2, 3, 4, 5], [6])])
    assert sample.train_counts == (0, 0, 0, 0, 0, 1)
    assert build_samples([first]) == []


def test_identical_calls_are_counted_as_often_as_sampled():
    calls = [call(f"c{i}", [1], [2, 3]) for i in range(4)]
    (sample,) = build_samples(calls)
    assert sample.train_counts == (0, 4, 4)


def test_certificate_detects_a_changed_token():
    calls = [call("a", [1, 2], [3])]
    (sample,) = build_samples(calls)
    assert certificate(calls, [replace(sample, token_ids=(1, 9, 3))]) == 0.0
    assert certificate(calls, []) == 0.0
    twice = [*calls, replace(calls[0], call_id="b")]
    (row,) = build_samples(twice)
    for change in ({"train_counts": (0, 0, 1)}, {"train_counts": (0, 1, 2)}, {"position_ids": (0, 0, 0)}):
        assert certificate(twice, [replace(row, **change)]) == 0.0
    assert certificate(twice, [row, replace(row, spans=())]) == 0.0
    (tree,) = build_samples(calls, "tree")
    assert certificate(calls, [tree]) == 1.0
    for change in ({"token_ids": (1, 9, 3)}, {"parents": (-1, 0, 0)}, {"train_counts": (0, 0, 0)}):
        assert certificate(calls, [replace(tree, **change)]) == 0.0


def test_wrong_number_of_logprobs_is_an_error():
    with pytest.raises(ValueError, match="2 completion tokens but 1 logprobs"):
        build_samples([call("a", [1], [2, 3], [-1.0])])


def test_limit_drops_whole_samples_and_keeps_the_episode_weight():
    calls = [call(f"c{i}", [i], [10 + i]) for i in range(5)]
    samples = build_samples(calls)
    limited, dropped = limit_samples(samples, 2, seed=1)
    assert (len(limited), dropped) == (2, 3)
    assert sum(s.weight for s in limited) == pytest.approx(1.0)
    assert limit_samples(samples, 2, seed=1)[0] == limited
    assert limit_samples(samples, 9, seed=1) == (samples, 0)


def test_a_long_call_id_is_shortened_in_a_message():
    with pytest.raises(ValueError, match="2 completion tokens but 1 logprobs") as caught:
        build_samples([call("x" * 100_000, [1], [2, 3], [-1.0])])
    assert len(str(caught.value)) < 1_000
