"""Run facts and configurations for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner.backbone.verl.rules import VerlRunFacts
from astuner.config.loading import with_values
from astuner.config.root import RunConfig

GPU = VerlRunFacts(
    device="cuda",
    rollout_engine="vllm",
    model_path="/models/small",
    checkpoint_folder=Path("/records/run/checkpoints"),
    total_steps=7,
    n_val=3,
    flash_attention=True,
    gpus=8,
)
CPU = replace(GPU, device="cpu", rollout_engine="embedded", flash_attention=False, gpus=0)


def run_config(**values: object) -> RunConfig:
    """Return a configuration for verl; `trainer_common__optim__lr=1.0` sets `astuner.trainer_common.optim.lr`."""
    named: dict[str, Any] = {f"astuner.{key.replace('__', '.')}": value for key, value in values.items()}
    return with_values(RunConfig(), {"astuner.backbone": "verl", **named})
