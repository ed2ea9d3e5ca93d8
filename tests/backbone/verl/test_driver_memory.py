"""The memory of the process that prepares the rows of an update."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from astuner.algorithms.registry import resolve
from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.verl.batch_layout import length_chunks, row_chunks
from astuner.config.root import AstunerConfig
from astuner.schema import CallSpan, Episode, LlmCall, Packed, Sample, Task

pytestmark = pytest.mark.verl

TOKENS, TRAINED, EPISODES = 30_000, 7_500, 160
# Bytes of a request to TransferQueue.
REQUEST = 2**24


def packed_episodes() -> list[Episode]:
    """Return episodes of one call each, which share their tokens."""
    ids = Packed[int]([(array("i", range(TOKENS)), 0, TOKENS)])
    logprobs = Packed[float]([(0.0, 0, TOKENS - TRAINED), (array("f", np.linspace(-1, 0, TRAINED)), 0, TRAINED)])
    prompt = TOKENS - TRAINED
    call = LlmCall("c", "e", ids.view(0, prompt), ids.view(prompt, TOKENS), logprobs.view(prompt, TOKENS), "stop")
    counts, positions = Packed[int]([(0, 0, prompt), (1, 0, TRAINED)]), Packed[int]([(range(TOKENS), 0, TOKENS)])
    sample = Sample(ids, counts, logprobs, positions, 1.0, (CallSpan("c", prompt, TOKENS),))
    return [
        Episode(f"e{n}", Task(f"t{n // 8}", "?"), n % 8, "ok", float(n % 2), True, (call,), samples=(sample,))
        for n in range(EPISODES)
    ]


def test_an_update_holds_few_bytes_of_each_row_besides_requests_of_bounded_size():
    from astuner.backbone.verl.update import VerlUpdate
    from tests.backbone.verl.driver import DriverTrainer, queue_replaced

    config = AstunerConfig()
    algorithm = resolve(config.trainer_common.algorithm)
    update = VerlUpdate(config, algorithm, DriverTrainer(TRAINED), torch.float32, total_steps=1, pad_token=0)
    episodes = packed_episodes()
    tracemalloc.start()
    try:
        with queue_replaced() as queue:
            result = update.step(episodes, 1)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Sampled tokens have a log-probability and an entropy.
    assert 8 * TRAINED <= held / EPISODES <= 10 * TRAINED
    # Sampled tokens also have a log-probability under the reference model. While rows are divided, the ids of all of
    # them are compared: 4 bytes a token.
    assert peak <= EPISODES * (4 * TRAINED + 5 * TOKENS) + 2 * REQUEST
    assert {"advantages", "ref_log_prob"} <= queue.fields
    assert len(queue.keys) > 3
    assert max(queue.sizes) <= REQUEST
    assert set(Counter(key for keys in queue.keys for key in keys).values()) == {2}  # its sample, and its loss
    assert sum(map(len, queue.keys)) == 2 * EPISODES
    (trained,) = result.samples[3]
    assert trained.logprobs is not None
    assert len(trained.logprobs) == TRAINED


def test_rows_are_divided_without_reading_later_ones():
    read: list[int] = []

    def rows():
        for number, count in enumerate([1, 1, 5, 1]):
            read.append(number)
            yield {"row": torch.zeros(count)}

    chunks = row_chunks(rows(), limit=8)
    assert [len(row["row"]) for row in next(chunks)] == [1, 1]
    assert read == [0, 1, 2]
    assert [[len(row["row"]) for row in chunk] for chunk in chunks] == [[5], [1]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([], []), ([1], [[0]]), ([9, 1, 2, 3, 1, 9, 9], [[0], [1, 2], [3, 4], [5], [6]])],
)
def test_lengths_are_divided_into_ranges(lengths: list[int], expected: list[list[int]]):
    assert [list(part) for part in length_chunks(lengths, limit=4)] == expected


def test_a_row_keeps_the_logprobs_after_top_p_in_four_bytes_a_token():
    (episode, *_) = packed_episodes()
    values = tuple(np.linspace(-2, 0, TRAINED, dtype=np.float32).tolist())
    call = replace(episode.calls[0], sampler_logprobs=values)
    row = TrainingRow.from_sample(episode.samples[0], 0).with_calls({"c": call})
    assert isinstance(row.sampler_logprobs, np.ndarray)
    assert row.sampler_logprobs.nbytes == 4 * TOKENS
    assert tuple(row.sampler_logprobs[-TRAINED:].tolist()) == values
    assert row.sampler_logprobs[: TOKENS - TRAINED].tolist() == [0.0] * (TOKENS - TRAINED)
