"""Trinity's configuration of a run, filled in and checked by Trinity itself."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from trinity.common.config import Config

from astuner.backbone.trinity.composition import compose_trinity_config
from astuner.backbone.trinity.plan import TrinityPlan
from astuner.config.root import RunConfig
from astuner.errors import BackboneError
from astuner.model_tuner import first_line


def checked_config(config: RunConfig, plan: TrinityPlan) -> Config:
    """Return Trinity's configuration of a run, filled in and checked by Trinity.

    Raises:
        BackboneError: Trinity refuses it.
    """
    composed = OmegaConf.merge(OmegaConf.structured(Config), compose_trinity_config(config, plan))
    checked: Any = OmegaConf.to_object(composed)
    try:
        return checked.check_and_update()
    # Trinity's checks raise errors of many kinds.
    except Exception as error:
        raise BackboneError(f"Trinity refuses its configuration: {first_line(error)}") from error
