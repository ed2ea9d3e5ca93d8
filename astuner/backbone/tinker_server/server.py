"""Serves a model on this machine until it is interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from astuner.backbone.ingredients import model_path
from astuner.backbone.tinker_server.app import create_app
from astuner.backbone.tinker_server.service import Limits, TinkerService
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.loopback import ADDRESS, listening, own_hosts

_LAST_ANSWERS_SECONDS = 3


@dataclass(frozen=True)
class ServerOptions:
    """What to serve, and how.

    Attributes:
        model: as `model.path` of the configuration.
        port: 0 takes a free one.
        device: auto, cpu or cuda.
        dtype: auto, float32 or bfloat16.
        folder: where checkpoints go, and are found again.
        limits: how much is held.
    """

    model: str
    port: int = 0
    device: str = "auto"
    dtype: str = "auto"
    folder: Path = Path("launcher_record/tinker")
    limits: Limits = field(default_factory=Limits)


class _Server(uvicorn.Server):
    """Ends the requests that wait for a result before it waits for requests to end."""

    def __init__(self, config: uvicorn.Config, service: TinkerService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._service.futures.close()
        await super().shutdown(sockets)


def serve(options: ServerOptions, ready: Callable[[str, tuple[str, ...]], None]) -> None:
    """Serve a model on 127.0.0.1 until Ctrl-C or SIGTERM.

    Args:
        options: what and how.
        ready: told the server's address and what clients may call the model, once it can be asked.

    Raises:
        ServiceError: the port is taken.
        ModelError: there is no such model.
        PluginError: `package.module->function` leads nowhere.
        BackboneError: there is no such device.
    """
    with listening(options.port) as listener:
        port = listener.getsockname()[1]
        folder = model_path(options.model, "--model", (Path.cwd(),))
        start = StartingModel(folder, _names(options.model, folder), options.device, options.dtype)
        service = TinkerService(start, options.folder, options.limits)
        config = uvicorn.Config(
            create_app(service, own_hosts(port)),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        )
        ready(f"http://{ADDRESS}:{port}", start.names)
        _Server(config, service).run([listener])


def _names(given: str, folder: str) -> tuple[str, ...]:
    """Return what clients may call the model: as it was given, and its folder, which they load the tokenizer from."""
    there = Path(folder).expanduser()
    absolute = str(there.resolve()) if there.is_dir() else folder
    return tuple(dict.fromkeys((absolute, folder, given)))
