"""An HTTP server through which OpenAI-compatible clients call the model in training."""

from astuner.gateway.http_server import Gateway
from astuner.gateway.sessions import EpisodeSession

__all__ = ["EpisodeSession", "Gateway"]
