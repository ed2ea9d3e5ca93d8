"""Fixtures: a server with a tiny model, and real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.tinker_server.service import Limits
from astuner.tinker_server.trainable_model import BaseLanguageModel

if TYPE_CHECKING:
    from tests.tinker_server.served import Served


@pytest.fixture(scope="session")
def base_model(model_folder: Path) -> BaseLanguageModel:
    """The base model; tests must not change it."""
    return BaseLanguageModel(str(model_folder), (str(model_folder),), "cpu", "float32")


@pytest.fixture(scope="session")
def served(base_model: BaseLanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server shared by tests."""
    from tests.tinker_server.served import serving  # skips the test if the client is not installed

    with serving(base_model, tmp_path_factory.mktemp("checkpoints"), Limits(models=64)) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    """A client of the shared server, whose models are unloaded after the test."""
    opened = served.client()
    yield opened
    opened.close("success").result()


@pytest.fixture
def fresh(model_folder: Path) -> Callable[[], Any]:
    """Return a function that loads the base model with transformers."""
    return lambda: AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
