"""Interactive environments: their base class, and the service that hosts them."""

from astuner.env_service.environment import Environment, load_environment

__all__ = ["Environment", "load_environment"]
