"""From a run's configuration to verl's: verl's packaged defaults, astuner's keys translated, the `verl:` section over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from astuner.config.keys import KeyPath
from astuner.config.root import RunConfig
from astuner.errors import BackboneError

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
        n_train: number of training tasks.
        n_val: number of validation tasks; 0 for none.
        origins: where the user set a key (`file:line`, `command line`), for messages; of `LoadedConfig.origins`.
    """

    device: Device
    rollout_engine: RolloutEngine
    model_path: str
    checkpoint_folder: Path
    total_steps: int
    n_train: int
    n_val: int
    origins: Mapping[KeyPath, str] = field(default_factory=dict)


def compose_verl_config(config: RunConfig, plan: VerlPlan) -> DictConfig:
    """Return the configuration that verl's trainer takes; it is in Hydra's struct mode and unresolved.

    Args:
        config: as loaded, names resolved.
        plan: what it leaves open.

    Raises:
        ConfigError: the `verl:` section names a key that verl does not have, or one that astuner sets.
        BackboneError: verl is not installed.
    """
    overrides = [f"actor_rollout_ref.model.path={plan.model_path}", f"trainer.device={plan.device}"]
    with initialize_config_dir(str(_packaged_folder()), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def _packaged_folder() -> Path:
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise BackboneError("backbone 'verl' needs verl, not installed here; run: astuner install verl")
    return Path(spec.origin).parent / "trainer" / "config"
