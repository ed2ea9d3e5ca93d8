"""Values that Trinity's configuration needs in addition to astuner's, and that are known only when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from astuner.backbone.packing.attention import imports_flash_attention
from astuner.config.keys import KeyPath

Device = Literal["cpu", "cuda"]
Mode = Literal["both", "bench"]


@dataclass(frozen=True, slots=True)
class TrinityRunFacts:
    """Values that are known only when a run starts: its YAML file does not contain them, or contains them as `auto`.

    Attributes:
        mode: `both` samples and trains, `bench` only samples.
        device: device of the model.
        model_path: an absolute folder without a colon, or a Hugging Face name.
        checkpoint_root_dir: folder of Trinity's state, from which astuner creates checkpoints.
        total_steps: training steps of the run, including those before a resume.
        namespace: namespace of the run's Ray actors.
        max_model_len: maximum number of tokens of prompt and answer together.
        tinker_base_url: address of the Tinker service that trains and samples; None for vLLM and verl on GPUs.
        takes_policy: whether that service takes temperature, alpha and modules of adapters (`TinkerPolicy`).
        heads: number of attention heads of the model; 0 if it is not known.
        runners: number of processes that run episodes, per engine.
        validates: whether the run has validation tasks.
        flash_attention: whether flash-attention can be imported.
        gpus: CUDA devices of this machine.
        origins: where the user set each key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    mode: Mode
    device: Device
    model_path: str
    checkpoint_root_dir: Path
    total_steps: int
    namespace: str
    max_model_len: int
    tinker_base_url: str | None = None
    takes_policy: bool = True
    heads: int = 0
    runners: int = 1
    validates: bool = False
    flash_attention: bool = field(default_factory=imports_flash_attention)
    gpus: int = field(default_factory=torch.cuda.device_count)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)

    @property
    def uses_tinker(self) -> bool:
        """True if a Tinker service trains and samples."""
        return self.tinker_base_url is not None
