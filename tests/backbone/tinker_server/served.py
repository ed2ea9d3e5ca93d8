"""Runs the server in this process, for the real client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from torch import Tensor

from astuner.backbone.tinker_server.app import create_app
from astuner.backbone.tinker_server.service import Limits, TinkerService
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.loopback import listening, own_hosts

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed: pip install -e .[dev]")


@dataclass
class Served:
    """A server that runs in a thread of this process.

    Attributes:
        url: where.
        model: what clients call its model.
        service: what it does.
    """

    url: str
    model: str
    service: TinkerService
    _open: list[tuple[Any, httpx.AsyncClient]] = field(default_factory=list)

    def client(self) -> Any:
        """A new client."""
        # One of ours, since the client never closes its own connections.
        http = httpx.AsyncClient(timeout=60)
        one = tinker.ServiceClient(base_url=self.url, api_key="tml-for-tests", http_client=http)
        self._open.append((one.holder, http))
        return one

    def part(self) -> None:
        """Close all clients."""
        for holder, http in self._open:
            holder.close()
            holder.run_coroutine_threadsafe(http.aclose()).result()

    def trained(self, model_id: str) -> Any:
        """The module of a model in training."""
        trainee = self.service.models.of(model_id).trainee
        assert trainee is not None
        return trainee.model


@contextmanager
def serving(start: StartingModel, folder: Path, limits: Limits | None = None) -> Iterator[Served]:
    """Run a server during the block."""
    with listening(0) as listener:
        port = listener.getsockname()[1]
        service = TinkerService(start, folder, limits or Limits())
        config = uvicorn.Config(create_app(service, own_hosts(port)), log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            one = Served(f"http://127.0.0.1:{port}", start.names[0], service)
            yield one
        finally:
            one.part()
            server.should_exit = True
            thread.join()


def datum(ids: list[int], **inputs: Any) -> Any:
    """A datum that predicts each token from those before it."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )


def logprobs_of(model: Any, ids: list[int]) -> Tensor:
    """The log-probability of each token of a sequence but the first, one sequence at a time."""
    logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].float()
    return torch.log_softmax(logits, dim=-1)[range(len(ids) - 1), ids[1:]]
