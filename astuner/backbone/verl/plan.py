"""What a run's configuration leaves open for verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from astuner.config.keys import KeyPath

Device = Literal["cpu", "cuda"]
RolloutEngine = Literal["embedded", "vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class VerlPlan:
    """Facts of a run that its YAML does not say, or says as `auto`.

    Attributes:
        device: where verl computes.
        rollout_engine: what samples.
        model_path: a local folder or a Hugging Face name.
        checkpoint_folder: verl writes `global_step_N` folders into it.
        total_steps: training steps of the whole run, those before a resume among them.
        n_val: number of validation tasks; 0 for none.
        max_positions: tokens that the model has positions for; None where its configuration does not say.
        origins: where the user set a key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    device: Device
    rollout_engine: RolloutEngine
    model_path: str
    checkpoint_folder: Path
    total_steps: int
    n_val: int
    max_positions: int | None = None
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
