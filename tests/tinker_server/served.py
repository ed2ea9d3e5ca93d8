"""Runs the server in a thread of this process, for real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from torch import Tensor

from astuner.backbone.training.tinker_policy import POLICY_HEADER, TinkerPolicy
from astuner.system.localhost import listen, local_hosts
from astuner.tinker_server.http_server import create_app
from astuner.tinker_server.service import Limits, TinkerService
from astuner.tinker_server.trainable_model import BaseLanguageModel

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed: pip install -e .[dev]")
public_pb = pytest.importorskip("tinker.proto.tinker_public_pb2")


@dataclass
class Served:
    """A running server.

    Attributes:
        url: its address.
        model: the name of its model.
        service: its service.
    """

    url: str
    model: str
    service: TinkerService
    _open: list[Any] = field(default_factory=list)

    def client(self, **policy: Any) -> Any:
        """Return a new client; with a policy, its session has that policy."""
        headers = {POLICY_HEADER: TinkerPolicy(**policy).model_dump_json()} if policy else {}
        client = tinker.ServiceClient(base_url=self.url, api_key="tml-for-tests", default_headers_overrides=headers)
        self._open.append(client)
        return client

    def close_clients(self) -> None:
        """Close the connections of all clients, without ending their sessions."""
        for client in self._open:
            close_connections(client)

    def trained(self, model_id: str) -> Any:
        """Return the module of a model in training."""
        trainable = self.service.models.get(model_id).trainable
        assert trainable is not None
        return trainable.model


@contextmanager
def serving(base_model: BaseLanguageModel, folder: Path, limits: Limits | None = None) -> Iterator[Served]:
    """Run a server during the block."""
    with listen(0) as listener:
        port = listener.getsockname()[1]
        service = TinkerService(base_model, folder, limits or Limits())
        config = uvicorn.Config(
            create_app(service, local_hosts(port)), log_level="warning", timeout_graceful_shutdown=1
        )
        uvicorn_server = uvicorn.Server(config)
        thread = threading.Thread(target=uvicorn_server.run, args=([listener],))
        thread.start()
        try:
            server = Served(f"http://127.0.0.1:{port}", base_model.names[0], service)
            yield server
        finally:
            server.close_clients()
            uvicorn_server.should_exit = True
            thread.join()


def close_connections(client: Any) -> None:
    """Close the connections of a client and stop its heartbeat, as if its process had ended."""
    loop = tinker.lib.internal_client_holder._internal_client_holder_thread_singleton.get_loop()
    asyncio.run_coroutine_threadsafe(client._close_holders(), loop).result()


def datum(ids: list[int], **inputs: Any) -> Any:
    """Return a datum that predicts each token from the previous ones."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )


def logprobs_of(model: Any, ids: list[int], temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token of a sequence except the first."""
    logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].float() / temperature
    return torch.log_softmax(logits, dim=-1)[range(len(ids) - 1), ids[1:]]
