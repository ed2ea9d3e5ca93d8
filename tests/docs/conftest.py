"""A model and a data set on which the commands of the documentation run within a second."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the keys that make a run small: a random model, four tasks, one step of 2 × 2 episodes."""
    folder = tmp_path_factory.mktemp("small")
    model, tasks = folder / "model", folder / "tasks"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    # The agents' prompts need a longer context. Positions are rotary, so it needs no additional weights.
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    tasks.mkdir()
    for index, split in enumerate(("train", "validation", "test")):
        numbers = range(10 * index, 10 * index + 4)
        rows = [{"question": f"What is {n} + {n}?", "answer": f"Add. #### {2 * n}"} for n in numbers]
        (tasks / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model.path": str(model),
        "task_reader.huggingface_dat_repo.dataset_path": str(tasks),
        "data.train_batch_size": 2,
        "rollout.num_repeat": 2,
        "rollout.max_env_worker": 2,
        "rollout.max_response_length_in_one_turn": 8,
        "rollout.val_kwargs.num_repeat": 1,
        "trainer_common.total_training_steps": 1,
        "trainer_common.val_pass_n": 1,
    }


@pytest.fixture
def tinker_server(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run `astuner serve-tinker` with the random model, and set the environment variables that its clients read."""
    tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed: pip install -e .[dev]")
    from astuner.tinker_server.trainable_model import BaseLanguageModel
    from tests.tinker_server.served import close_connections, serving

    base_model = BaseLanguageModel(str(model_folder), (str(model_folder),), "cpu", "float32")
    with serving(base_model, tmp_path / "tinker") as served:
        monkeypatch.setenv("TINKER_BASE_URL", served.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-local")
        clients: list[Any] = []

        def service_client(**options: Any) -> Any:
            clients.append(open_client(**options))
            return clients[-1]

        open_client = tinker.ServiceClient
        monkeypatch.setattr(tinker, "ServiceClient", service_client)
        yield
        # A client that outlives its server sends heartbeats to it for minutes.
        for client in clients:
            close_connections(client)
