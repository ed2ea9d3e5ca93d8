"""The components of the episodes' rewards, for algorithms that normalise them separately."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.algorithms import group_decoupled_advantages, has_signal
from astuner.errors import BackboneError, shorten
from astuner.schema import Episode


@dataclass(frozen=True)
class RewardComponents:
    """The K reward components of a step's E episodes.

    Attributes:
        names: K names.
        weights: K weights.
        rewards: [E, K] float32; NaN if the judge of an episode has not returned the component.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    rewards: Tensor

    def advantages(self, group_ids: Tensor, by_std: bool, shaping: Tensor) -> Tensor:
        """Return the advantages of the episodes, [E] float32; see `group_decoupled_advantages`."""
        return group_decoupled_advantages(self.rewards, group_ids, by_std, self.weights, shaping)

    def have_signal(self, group_ids: Tensor) -> Tensor:
        """Return, for each episode, whether a component with a weight differs in its group, [E] bool.

        The weighted sums of the components can still be equal.
        """
        signal = torch.zeros(len(group_ids), dtype=torch.bool)
        for weight, column in zip(self.weights, self.rewards.unbind(1), strict=True):
            has_reward = ~column.isnan()
            differs = has_signal(column[has_reward], group_ids[has_reward])
            if weight != 0:
                signal |= torch.isin(group_ids, group_ids[has_reward][differs])
        return signal


def reward_components(episodes: Sequence[Episode], weights: Mapping[str, float]) -> RewardComponents:
    """Return the reward components of a step's episodes.

    An episode without a judgement, for example one whose reward the workflow has returned, has its reward as each
    component. The reward is the only component if `weights` is empty and no component has a name without a dot.

    Args:
        episodes: E episodes with a reward.
        weights: the weights of the components by name. If empty, each component whose name has no dot has weight 1.

    Raises:
        BackboneError: no episode has a component of `weights`.
    """
    by_episode = [
        episode.judgement.components if episode.judgement is not None and episode.judgement.components else None
        for episode in episodes
    ]
    names = sorted({name for components in by_episode for name in components or ()})
    if missing := [name for name in weights if name not in names]:
        raise BackboneError(
            f"trainer_common.algorithm.component_weights names {shorten(', '.join(missing))}, which no episode of the "
            f"step has; the components that the judge returned are: {shorten(', '.join(names)) or 'none'}. Name those, "
            "or return the others as `components` of the judgement"
        )
    used = dict(weights) or {name: 1.0 for name in names if "." not in name}
    if not used:
        rewards = torch.tensor([[episode.reward] for episode in episodes], dtype=torch.float32)
        return RewardComponents(("",), (1.0,), rewards)
    rows = [
        [episode.reward if components is None else components.get(name, math.nan) for name in used]
        for episode, components in zip(episodes, by_episode, strict=True)
    ]
    return RewardComponents(tuple(used), tuple(used.values()), torch.tensor(rows, dtype=torch.float32))
