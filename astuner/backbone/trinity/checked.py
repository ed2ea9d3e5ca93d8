"""Trinity's configuration of a run, filled in and checked by Trinity itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from trinity.common.config import Config

from astuner.backbone.trinity.composition import compose_trinity_config
from astuner.backbone.trinity.plan import TrinityPlan
from astuner.config.root import RunConfig
from astuner.errors import BackboneError
from astuner.model_tuner import first_line


def filled_in(config: RunConfig, plan: TrinityPlan) -> Config:
    """Return Trinity's configuration of a run, not yet checked by Trinity, which asks the Tinker service then.

    Raises:
        ConfigError: as `compose_trinity_config`.
    """
    composed = OmegaConf.merge(OmegaConf.structured(Config), compose_trinity_config(config, plan))
    filled: Any = OmegaConf.to_object(composed)
    # As Trinity's check will: its processes find the place in their environment.
    filled.log.save_dir = str(Path(filled.get_checkpoint_job_dir()) / "log")
    return cast(Config, filled)


def checked(filled: Config) -> Config:
    """Return it checked by Trinity.

    Raises:
        BackboneError: Trinity refuses it.
    """
    try:
        return filled.check_and_update()
    # Trinity's checks raise errors of many kinds.
    except Exception as error:
        raise BackboneError(f"Trinity refuses its configuration: {first_line(error)}") from error
