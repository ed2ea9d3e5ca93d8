"""Training rows: the context tracker's samples with their calls' advantages, for every trainer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.algorithms import sample_scales
from astuner.config.algorithms import LossAggMode, MiniBatchUnit
from astuner.schema import LlmCall, Sample


@dataclass(frozen=True)
class TrainingRow:
    """One token sequence to train on; all per-token sequences have length N.

    Attributes:
        token_ids: N token ids.
        train_counts: N counts: how often each token is trained; 0 for context.
        logprobs: N log-probabilities from the sampler; empty for transcripts.
        old_logprobs: N log-probabilities that replace `logprobs` in the probability ratio; empty to use `logprobs`.
        calls: (start, end) of the completion of each LLM call; empty for transcripts.
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
            sample: the sample.
            episode: index of its episode in the batch.
            index: index of the sample in the episode.
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

    def with_temperatures(self, temperatures: Mapping[str, float]) -> TrainingRow:
        """Return the row with its calls' sampling temperatures, taken from a mapping from call ids to temperatures."""
        return replace(self, temperatures=[temperatures[call_id] for call_id in self.call_ids])

    def with_sampler_logprobs(self, calls: Mapping[str, LlmCall]) -> TrainingRow:
        """Return the row with its calls' sampler logprobs, taken from a mapping from call ids to calls."""
        if not any(calls[call_id].sampler_logprobs for call_id in self.call_ids):
            return self
        logprobs = np.array(self.logprobs, np.float32)
        for (start, end), call_id in zip(self.calls, self.call_ids, strict=True):
            if calls[call_id].sampler_logprobs:
                logprobs[start:end] = calls[call_id].sampler_logprobs
        return replace(self, sampler_logprobs=logprobs)

    def with_advantages(self, episode_advantage: float, call_advantages: Mapping[str, float]) -> TrainingRow:
        """Return the row with the advantages of its calls.

        Args:
            episode_advantage: the advantage of calls that are not in `call_advantages`.
            call_advantages: advantages by call id.
        """
        advantages = [call_advantages.get(call_id, episode_advantage) for call_id in self.call_ids]
        return replace(self, advantages=advantages)

    @property
    def has_advantage(self) -> bool:
        """Whether any of its calls or tokens has an advantage other than 0."""
        return any(self.advantages) or (self.teacher_advantages is not None and bool(self.teacher_advantages.any()))


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

    The numbers of units of two mini-batches differ by at most one. With episodes as units, a group is divided only
    where this requires it; with groups, it is never divided.

    Args:
        rows: all rows of a step.
        groups: the group of each episode, by the episode's index.
        count: the number of mini-batches.
        seed: the seed of the order.
        unit: whether mini-batches consist of episodes or of whole groups.

    Returns:
        The indices of the rows of each mini-batch, in ascending order. The rows of an episode stay together.
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
