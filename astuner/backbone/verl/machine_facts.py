"""Values that verl's configuration needs in addition to astuner's, and that are known only when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from astuner.backbone.packing.attention import imports_flash_attention
from astuner.backbone.ray_cluster.started import StartedRay
from astuner.config.keys import KeyPath

Device = Literal["cpu", "cuda"]
RolloutEngine = Literal["embedded", "vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class VerlRunFacts:
    """Values that are known only when a run starts: its YAML file does not contain them, or contains them as `auto`.

    Attributes:
        device: device of verl's workers.
        rollout_engine: the inference engine.
        model_path: a local folder or a Hugging Face name.
        checkpoint_folder: folder of astuner's checkpoints; verl itself writes nothing there.
        total_steps: training steps of the run, including those before a resume.
        n_val: number of validation tasks; 0 for none.
        max_positions: number of positions of the model; None if its configuration does not state it.
        heads: number of attention heads of the model; 0 if it is not known.
        packed_attention: whether astuner's packed attention supports the model; true if the model is not known yet.
        flash_attention: whether flash-attention can be imported.
        gpus: CUDA devices of this machine.
        ray: the Ray cluster that a service of the run started; None if the backbone starts one or joins `ray_address`.
        origins: where the user set each key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    device: Device
    rollout_engine: RolloutEngine
    model_path: str
    checkpoint_folder: Path
    total_steps: int
    n_val: int
    max_positions: int | None = None
    heads: int = 0
    packed_attention: bool = True
    flash_attention: bool = field(default_factory=imports_flash_attention)
    gpus: int = field(default_factory=torch.cuda.device_count)
    ray: StartedRay | None = None
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
