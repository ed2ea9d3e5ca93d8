"""Configurations and run facts for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner.backbone.trinity.rules import TrinityRunFacts
from astuner.config.loading import with_values
from astuner.config.root import RunConfig

GPU = TrinityRunFacts(
    mode="both",
    device="cuda",
    model_path="/models/small",
    checkpoint_root_dir=Path("/records/run/trinity"),
    total_steps=7,
    namespace="run-1",
    max_model_len=18000,
    runners=3,
    flash_attention=True,
    gpus=8,
)
TINKER = replace(GPU, device="cpu", validates=True, tinker_base_url="http://127.0.0.1:8765", gpus=0)
FOREIGN = replace(TINKER, takes_policy=False)
"""With a Tinker service that is not `astuner serve-tinker`."""


def run_config(**values: object) -> RunConfig:
    """Return a configuration for Trinity; `trainer_common__optim__lr=1.0` sets a key below `astuner`."""
    named: dict[str, Any] = {f"astuner.{key.replace('__', '.')}": value for key, value in values.items()}
    return with_values(RunConfig(), {"astuner.backbone": "trinity", "astuner.rollout.temperature": 1.0, **named})
