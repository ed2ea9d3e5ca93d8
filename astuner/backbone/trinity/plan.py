"""What a run's configuration leaves open for Trinity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from astuner.config.keys import KeyPath

Device = Literal["cpu", "cuda"]
Mode = Literal["both", "bench"]


@dataclass(frozen=True, slots=True)
class TrinityPlan:
    """Facts of a run that its YAML does not say, or says as `auto`.

    Attributes:
        mode: both trains, bench only samples.
        device: where the model is computed.
        model_path: an absolute folder without a colon, or a Hugging Face name.
        checkpoint_root_dir: where Trinity keeps its own state; astuner makes checkpoints of it.
        total_steps: training steps of the whole run, those before a resume among them.
        namespace: of the run's Ray actors.
        max_model_len: tokens, prompt and answer together.
        tinker_base_url: the Tinker service that trains and samples; None for vLLM and verl on GPUs.
        runners: processes that run episodes, for each engine.
        validates: whether the run has validation tasks.
        gpus: CUDA devices of this machine.
        origins: where the user set a key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    mode: Mode
    device: Device
    model_path: str
    checkpoint_root_dir: Path
    total_steps: int
    namespace: str
    max_model_len: int
    tinker_base_url: str | None = None
    runners: int = 1
    validates: bool = False
    gpus: int = field(default_factory=torch.cuda.device_count)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)

    @property
    def uses_tinker(self) -> bool:
        """Whether a Tinker service trains and samples."""
        return self.tinker_base_url is not None
