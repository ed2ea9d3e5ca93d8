"""Interactive environments: their base class, the service that hosts them, and its client."""

from astuner.env_service.environment import Environment, load_environment

__all__ = ["Environment", "load_environment"]
