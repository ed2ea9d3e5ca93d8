"""The example of generated tasks, with its endpoint."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from astuner.backbone.training.run_inputs import with_task_files
from astuner.config.loading import load_config
from astuner.errors import ConfigError
from astuner.task_reader import read_tasks
from tutorial.example_data_generation.helper_endpoint import Handler

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tutorial/example_data_generation/data_generation.yaml"


def test_the_example_generates_right_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tutorial").symlink_to(ROOT / "tutorial")
    for name in ("DASHSCOPE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    reader = load_config(CONFIG).config.astuner.task_reader
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        llm = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "cache_dir": str(tmp_path / "cache")}
        section = reader.data_generation.model_copy(
            update={"task_num": 20, "llm": reader.data_generation.llm.model_copy(update=llm)}
        )
        reader = reader.model_copy(update={"data_generation": section})
        files = with_task_files(reader, transcripts=False, base_dir=CONFIG.parent, search=[])
        server.shutdown()
    tasks = read_tasks(files, base_dir=CONFIG.parent, search=[])
    assert (len(tasks.training) + len(tasks.validation)) == 20
    assert tasks.validation
    for task in (*tasks.training, *tasks.validation):
        assert str(eval(task.main_query.removeprefix("What is ").removesuffix("?"))) == task.metadata["answer"]
    with pytest.raises(ConfigError, match="generates tasks; set"):
        with_task_files(reader, transcripts=True, base_dir=CONFIG.parent, search=[])
