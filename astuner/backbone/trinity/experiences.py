"""The tracker's samples as Trinity's experiences: ids, logprobs and masks as they are, never encoded again."""

from __future__ import annotations

import torch
from trinity.common.experience import EID, Experience

from astuner.backbone.rows import prompt_length
from astuner.schema import Episode, Sample

EPISODE, SAMPLE, STEP = "episode", "sample", "step"
"""Keys of `Experience.info`: the episode's id, the sample's number within it, and the training step."""


def experiences(episode: Episode, step: int, place: int) -> list[Experience]:
    """Return an episode's samples as experiences.

    Args:
        episode: with a reward.
        step: the training step that it is of.
        place: of its task in the batch.
    """
    return [
        _experience(sample, episode, {EPISODE: episode.episode_id, SAMPLE: number, STEP: step}, place)
        for number, sample in enumerate(episode.samples)
    ]


def filler(step: int) -> Experience:
    """Return the shortest experience, which trains nothing."""
    return Experience(
        tokens=[0, 0],
        logprobs=[0.0],
        reward=0.0,
        prompt_length=1,
        action_mask=[False],
        info={EPISODE: "", SAMPLE: 0, STEP: step},
    )


def _experience(sample: Sample, episode: Episode, info: dict[str, object], place: int) -> Experience:
    start = prompt_length(sample)
    return Experience(
        eid=EID(task=place, run=episode.repeat_index, step=int(str(info[SAMPLE]))),
        tokens=torch.tensor(sample.token_ids, dtype=torch.int32),
        logprobs=torch.tensor(sample.logprobs[start:], dtype=torch.float32),
        reward=episode.reward,
        prompt_length=start,
        action_mask=torch.tensor(sample.loss_mask[start:]).bool(),
        info=info,
    )
