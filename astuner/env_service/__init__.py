"""Interactive environments: their base class, the service that hosts them, and its client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.doors import lazy_names

if TYPE_CHECKING:
    from astuner.env_service.environment import Environment, load_environment

__all__ = ["Environment", "load_environment"]

# Every run imports the addresses of this package, and few have an environment.
__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "astuner.env_service.environment"))
