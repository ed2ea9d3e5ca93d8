"""Section `asynchrony`: how far sampling may run ahead of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from astuner.config.section import Section


class AsynchronyConfig(Section):
    """`asynchrony`: how far sampling may run ahead of training (trinity).

    A token's staleness is the number of training steps that the weights it was sampled with are behind those that it
    trains.
    """

    sync_style: Literal["explorer_driven", "trainer_driven", "fully_async", "fixed"] = "explorer_driven"
    """Who asks for new weights: explorer_driven (sampling), trainer_driven, or fully_async (in the midst of a step)."""
    sync_interval: PositiveInt = 1
    """Training steps between two syncs of the weights."""
    max_staleness: NonNegativeInt = 1
    """The largest staleness; sampling waits before it would be larger. 0 is no asynchrony."""
    over_rollout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of a step's tasks that need not be waited for; the slowest are given up and counted."""
    over_rollout_wait: PositiveFloat = 30.0
    """Seconds that they get when the others are done."""
    stall_timeout: PositiveFloat = 1800.0
    """Seconds in which no episode ends and nothing is learned, after which the run ends with an error."""
