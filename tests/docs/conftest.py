"""A model and a data set so small that the commands of the documentation run on them in a second."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Keys of section `astuner` that make any run small: the random model, four tasks, one step of 2 × 2 episodes."""
    folder = tmp_path_factory.mktemp("small")
    model, tasks = folder / "model", folder / "tasks"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    # Positions are rotary, so a longer context costs no weights; the agents' prompts need it.
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    tasks.mkdir()
    for place, split in enumerate(("train", "validation", "test")):
        numbers = range(10 * place, 10 * place + 4)
        rows = [{"question": f"What is {n} + {n}?", "answer": f"Add. #### {2 * n}"} for n in numbers]
        (tasks / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model.path": str(model),
        "task_reader.huggingface_dat_repo.dataset_path": str(tasks),
        "data.train_batch_size": 2,
        "rollout.num_repeat": 2,
        "rollout.max_response_length_in_one_turn": 8,
        "rollout.val_kwargs.num_repeat": 1,
        "trainer_common.total_training_steps": 1,
        "trainer_common.val_pass_n": 1,
    }


@pytest.fixture
def a_tinker_server(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`astuner serve-tinker` with the random model, and the environment's variables that lead a client to it."""
    tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed: pip install -e .[dev]")
    import httpx

    from astuner.backbone.tinker_server.starting_model import StartingModel
    from tests.backbone.tinker_server.served import serving

    start = StartingModel(str(model_folder), (str(model_folder),), "cpu", "float32")
    with serving(start, tmp_path / "tinker") as served:
        monkeypatch.setenv("TINKER_BASE_URL", served.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-local")
        # The client never closes its own connections.
        http = httpx.AsyncClient(timeout=60)
        monkeypatch.setattr(tinker, "ServiceClient", partial(tinker.ServiceClient, http_client=http))
        yield
        loop = tinker.lib.internal_client_holder._internal_client_holder_thread_singleton.get_loop()
        asyncio.run_coroutine_threadsafe(http.aclose(), loop).result()
