"""A short turn of the flywheel: an agent is served, rated, and trained on its good answers; the result is served."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx

from astuner.task_sources.tracing.reader import read_traces
from tests.launcher.test_serve import serving
from tutorial.example_flywheel.flywheel import deploy, served, train


def test_a_model_is_served_rated_trained_and_served_again(tokenizer: Any, model_folder: Path, tmp_path: Path) -> None:
    traces = tmp_path / "turn_1" / "traces.jsonl"
    tasks = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in (21, 20, 19)]
    with serving(tokenizer, traces, "\\boxed{42}") as address:
        success = asyncio.run(deploy(address, tasks, "user"))
    assert success == 1 / 3
    read = read_traces(traces)
    assert {trace.question: trace.feedback.rating for trace in read.traces} == {
        "What is 21 + 21?": 1.0,
        "What is 20 + 20?": 0.0,
        "What is 19 + 19?": 0.0,
    }
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    # The agent's prompts need a longer context. Positions are rotary, so it needs no additional weights.
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    settings = {"trainer_common.total_training_steps": 1, "data.train_batch_size": 1}
    tuned = train(model, traces, tmp_path / "turn_1", settings)
    (transcript,) = (tmp_path / "turn_1" / "training.jsonl").read_text().splitlines()
    assert "What is 21 + 21?" in transcript
    assert "execute_python_code" in transcript
    with served(tuned, tmp_path / "traces_2.jsonl") as address:
        messages = [{"role": "user", "content": "What is 1 + 1?"}]
        body = {"model": "astuner", "messages": messages, "max_tokens": 3}
        assert httpx.post(f"{address}/chat/completions", json=body, timeout=120).status_code == 200
    assert len(read_traces(tmp_path / "traces_2.jsonl").traces) == 1
