"""What a run's configuration leaves open for verl."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from astuner.backbone.cluster.head import StartedRay
from astuner.config.keys import KeyPath

Device = Literal["cpu", "cuda"]
RolloutEngine = Literal["embedded", "vllm", "sglang"]


def imports_flash_attention() -> bool:
    """Return whether flash-attention is installed and built for the PyTorch that is here."""
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class VerlPlan:
    """Facts of a run that its YAML does not say, or says as `auto`.

    Attributes:
        device: where verl computes.
        rollout_engine: what samples.
        model_path: a local folder or a Hugging Face name.
        checkpoint_folder: where astuner's checkpoints lie; verl is told of it, and writes nothing there by itself.
        total_steps: training steps of the whole run, those before a resume among them.
        n_val: number of validation tasks; 0 for none.
        max_positions: tokens that the model has positions for; None where its configuration does not say.
        flash_attention: whether flash-attention imports here.
        gpus: CUDA devices of this machine.
        ray: of the run, where it is a service; None where the backbone starts one, or joins that of `ray_address`.
        origins: where the user set a key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    device: Device
    rollout_engine: RolloutEngine
    model_path: str
    checkpoint_folder: Path
    total_steps: int
    n_val: int
    max_positions: int | None = None
    flash_attention: bool = field(default_factory=imports_flash_attention)
    gpus: int = field(default_factory=torch.cuda.device_count)
    ray: StartedRay | None = None
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
