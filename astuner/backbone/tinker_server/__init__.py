"""A small local server that speaks the wire format of tinker 0.20, for training loops written against that service.

Each request that takes time becomes a future that the client asks for. Training runs in one thread, in order; sampling
on embedded engines, one for each set of weights that is in use.
"""

from astuner.backbone.tinker_server.server import ServerOptions, serve
from astuner.backbone.tinker_server.service import Limits

__all__ = ["Limits", "ServerOptions", "serve"]
