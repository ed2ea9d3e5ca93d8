"""Training rows: the tracker's samples with their calls' advantages, and what the record keeps about their update."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.algorithms.aggregate import sample_scales
from astuner.config.algorithms import LossAggMode, MiniBatchUnit
from astuner.run_record.updates import SampleUpdate, count_trained_tokens
from astuner.schema import Episode, Floats, LlmCall, Sample

SampleKey = tuple[int, int]
"""The indices of an episode and a sample within it."""


@dataclass(frozen=True)
class TrainingRow:
    """One token sequence to train on; all per-token sequences have length N.

    Attributes:
        token_ids: N token ids.
        train_counts: N counts: how often each token is trained; 0 for context.
        logprobs: N log-probabilities from the sampler; empty for transcripts.
        old_logprobs: N log-probabilities that replace `logprobs` in the probability ratio; empty to use `logprobs`.
        calls: (start, end) of each LLM call's completion; empty for transcripts.
        call_ids: the ids of those calls.
        advantages: the advantages of those calls; empty until they are assigned.
        temperatures: the sampling temperatures of those calls; empty for transcripts.
        sampler_logprobs: N log-probabilities under the distributions that the tokens were sampled from, after top-p,
            top-k, penalties and constraints; empty if they are `logprobs`.
        teacher_advantages: [N] float32, added to the advantages of the tokens; None without a teacher.
        episode: index of the row's episode in its batch.
        sample: index of the row's sample in its episode.
    """

    token_ids: Sequence[int] | NDArray[np.int32]
    train_counts: Sequence[int] | NDArray[np.int32]
    logprobs: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    calls: Sequence[tuple[int, int]] = ()
    call_ids: Sequence[str] = ()
    advantages: Sequence[float] = ()
    temperatures: Sequence[float] = ()
    sampler_logprobs: Sequence[float] | NDArray[np.float32] = ()
    teacher_advantages: NDArray[np.float32] | None = None
    episode: int = 0
    sample: int = 0

    @staticmethod
    def from_sample(sample: Sample, episode: int, index: int = 0) -> TrainingRow:
        """Return the row of a sample, which must not be a tree.

        Args:
            episode: index of its episode in the batch.
        """
        assert sample.parents is None
        return TrainingRow(
            sample.token_ids,
            sample.train_counts,
            sample.logprobs,
            calls=[(span.start, span.end) for span in sample.spans],
            call_ids=[span.call_id for span in sample.spans],
            episode=episode,
            sample=index,
        )

    def with_calls(self, calls: Mapping[str, LlmCall]) -> TrainingRow:
        """Return the row with its calls' sampling temperatures and sampler logprobs; `calls` has them by id."""
        row = replace(self, temperatures=[calls[call_id].sampling.temperature for call_id in self.call_ids])
        if not any(calls[call_id].sampler_logprobs for call_id in self.call_ids):
            return row
        logprobs = np.array(self.logprobs, np.float32)
        for (start, end), call_id in zip(self.calls, self.call_ids, strict=True):
            if calls[call_id].sampler_logprobs:
                logprobs[start:end] = calls[call_id].sampler_logprobs
        return replace(row, sampler_logprobs=logprobs)

    def with_advantages(self, episode_advantage: float, call_advantages: Mapping[str, float]) -> TrainingRow:
        """Return the row with the advantages of its calls.

        Args:
            episode_advantage: the advantage of calls that are not in `call_advantages`.
        """
        advantages = [call_advantages.get(call_id, episode_advantage) for call_id in self.call_ids]
        return replace(self, advantages=advantages)

    @property
    def has_advantage(self) -> bool:
        """Whether any of its calls or tokens has an advantage other than 0."""
        return any(self.advantages) or (self.teacher_advantages is not None and bool(self.teacher_advantages.any()))


def training_rows(episodes: Sequence[Episode]) -> list[TrainingRow]:
    """Return a row for each sample in the episodes, in order, with what it needs from its calls."""
    calls = [{call.call_id: call for call in episode.calls} for episode in episodes]
    return [
        TrainingRow.from_sample(sample, index, number).with_calls(calls[index])
        for index, episode in enumerate(episodes)
        for number, sample in enumerate(episode.samples)
    ]


def prompt_length(sample: Sample) -> int:
    """Return the number of tokens before the first trained token. It is at least 1, because no prompt is empty."""
    return min(span.start for span in sample.spans)


def token_advantages(rows: Sequence[TrainingRow], length: int) -> Tensor:
    """Return the advantage of each token, [rows, length] float32, 0 outside the calls.

    Calls that share a token have the same reward (see `build_samples`), and therefore the same advantage.
    """
    table = torch.zeros((len(rows), length))
    for index, row in enumerate(rows):
        for (start, end), advantage in zip(row.calls, row.advantages, strict=False):
            table[index, start:end] = advantage
        if row.teacher_advantages is not None:
            table[index, : len(row.teacher_advantages)] += torch.from_numpy(row.teacher_advantages)
    return table


def token_temperatures(rows: Sequence[TrainingRow], length: int) -> Tensor | float | None:
    """Return the temperature of each token, [rows, length] float32, 1 outside the calls.

    If all calls have the same temperature, return it; if the rows are transcripts, None. Calls that share a token have
    the same temperature (see `build_samples`).
    """
    distinct = {temperature for row in rows for temperature in row.temperatures}
    if len(distinct) < 2:
        return next(iter(distinct), None)
    table = torch.ones((len(rows), length))
    for index, row in enumerate(rows):
        for (start, end), temperature in zip(row.calls, row.temperatures, strict=True):
            table[index, start:end] = temperature
    return table


def mini_batches(
    rows: Sequence[TrainingRow], groups: Sequence[str], count: int, seed: str, unit: MiniBatchUnit = "episode"
) -> list[list[int]]:
    """Shuffle the groups and cut them into `count` mini-batches, or fewer if there are fewer units.

    Two mini-batches' numbers of units differ by at most one. With episodes as units, a group is divided only
    where this requires it; with groups, it is never divided.

    Args:
        rows: all rows of a step.
        groups: the group of each episode, by the episode's index.
        count: the number of mini-batches.
        unit: whether mini-batches consist of episodes or whole groups.

    Returns:
        The row indices of each mini-batch, in ascending order. The rows of an episode stay together.
    """
    episodes = sorted({row.episode for row in rows})
    random_numbers = random.Random(seed)
    random_numbers.shuffle(episodes)
    order = sorted({groups[episode] for episode in episodes})
    random_numbers.shuffle(order)
    rank = {group: index for index, group in enumerate(order)}
    episodes.sort(key=lambda episode: rank[groups[episode]])
    units = [groups[episode] for episode in episodes] if unit == "group" else episodes
    place = {value: index for index, value in enumerate(dict.fromkeys(units))}
    count = min(count, len(place))
    mini_batch_of = {e: place[value] * count // len(place) for e, value in zip(episodes, units, strict=True)}
    batches: list[list[int]] = [[] for _ in range(count)]
    for index, row in enumerate(rows):
        batches[mini_batch_of[row.episode]].append(index)
    return batches


def row_scales(rows: Sequence[TrainingRow], mode: LossAggMode, max_response_length: int) -> Tensor:
    """Return the factors that turn the rows' `train_counts` into token weights (see `sample_scales`).

    Args:
        rows: all rows of a mini-batch.
        mode: how token losses become one number.
        max_response_length: tokens.

    Returns:
        [rows] float32.

    Raises:
        BackboneError: no token of the mini-batch is trained.
    """
    trained = torch.tensor([int(np.asarray(row.train_counts).sum()) for row in rows])
    return sample_scales(trained, torch.tensor([row.episode for row in rows]), mode, max_response_length)


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values that an update computes for the M trained tokens of a sample, in order.

    Attributes:
        logprobs: [M] float32, log-probabilities of the tokens.
        entropies: [M] float32, entropies in nats of the distributions from which they were sampled.
    """

    logprobs: Floats
    entropies: Floats


def sample_updates(
    episodes: Sequence[Episode], rows: Sequence[TrainingRow], values: Mapping[SampleKey, TokenValues]
) -> tuple[tuple[SampleUpdate, ...], ...]:
    """Return an update record for each sample, grouped by episode.

    Args:
        episodes: E episodes.
        rows: the trained rows, with advantages. A sample without a row, for example of a group that the algorithm
            leaves out, has advantage 0.
        values: the trainer's values of each sample's trained tokens, where the update computed them.
    """
    row_of = {(row.episode, row.sample): row for row in rows}
    return tuple(
        tuple(
            _sample_update(sample, row_of.get((index, number)), values.get((index, number)))
            for number, sample in enumerate(episode.samples)
        )
        for index, episode in enumerate(episodes)
    )


def _sample_update(sample: Sample, row: TrainingRow | None, values: TokenValues | None) -> SampleUpdate:
    advantages = _advantage_runs(sample, row)
    return SampleUpdate(advantages) if values is None else SampleUpdate(advantages, values.logprobs, values.entropies)


def _advantage_runs(sample: Sample, row: TrainingRow | None) -> tuple[tuple[int, float], ...]:
    """Return the trained tokens' advantages, in order, as (number of tokens, advantage)."""
    advantages = set(row.advantages) if row else {0.0}
    if len(advantages) == 1 and (row is None or row.teacher_advantages is None):
        return ((count_trained_tokens(sample), advantages.pop()),)
    assert row is not None
    table = token_advantages([row], len(sample.token_ids))[0].tolist()
    values = (advantage for advantage, count in zip(table, sample.train_counts, strict=True) if count)
    return tuple((len(list(run)), advantage) for advantage, run in groupby(values))
