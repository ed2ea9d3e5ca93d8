"""The result of a judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a judge for one episode.

    A judgement without `reward`, `agent_rewards` and `call_rewards` is unscored: the episode has no reward, is not
    trained, and is counted under `unscored_cause`. The values are checked when the judge returns them.

    Attributes:
        reward: the reward of the episode; None if agents or calls have rewards, whose mean it then is, or if the judge
            cannot score the episode.
        is_success: whether the task was solved; None means `reward > 0`.
        components: the parts of the reward by name, for example `{"correct": 1.0, "format": 0.5}`. They are recorded,
            and logged as `reward/{name}/mean`; the algorithm `gdpo` normalises each of them separately.
        agent_rewards: the rewards of the agents by name; every trained agent must be in it.
        call_rewards: the rewards of the LLM calls, in the order of `WorkflowOutput.calls`.
        explanation: the reason for the reward, or for its absence.
        unscored_cause: a short name of why the episode is unscored, for example `rate_limit`.
        metadata: further results to record.
        metrics: numbers whose mean over the episodes of a step is logged as `judge/{name}`.
    """

    reward: float | None = None
    is_success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    call_rewards: tuple[float, ...] = ()
    explanation: str = ""
    unscored_cause: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Whether it has a reward."""
        return self.reward is not None or bool(self.agent_rewards) or bool(self.call_rewards)
