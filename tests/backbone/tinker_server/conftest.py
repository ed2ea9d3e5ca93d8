"""The server on a tiny model, and the real client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.backbone.tinker_server.service import Limits
from astuner.backbone.tinker_server.starting_model import StartingModel

if TYPE_CHECKING:
    from tests.backbone.tinker_server.served import Served


@pytest.fixture(scope="session")
def start(model_folder: Path) -> StartingModel:
    """The starting model, which no test may change."""
    return StartingModel(str(model_folder), (str(model_folder),), "cpu", "float32")


@pytest.fixture(scope="session")
def served(start: StartingModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests that need none of their own."""
    from tests.backbone.tinker_server.served import serving  # which needs the client; without it, tests are skipped

    with serving(start, tmp_path_factory.mktemp("checkpoints"), Limits(models=64)) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Any:
    """A client of it."""
    return served.client()


@pytest.fixture
def fresh(model_folder: Path) -> Callable[[], Any]:
    """Makes the starting model anew, by transformers alone."""
    return lambda: AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
