"""The example of learned rubrics: its grading server, the rubrics that are learned from it, and the grades."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner import WorkflowOutput, WorkflowTask
from astuner.backbone.training.run_inputs import load_rubrics
from astuner.config.loading import load_config
from astuner.config.root import AstunerConfig
from astuner.schema import Task
from astuner.task_judge.rubrics_auto_grader.grader import make_grader
from tutorial.example_rm_auto_grader import grading_server, writer

CONFIG = Path(__file__).parents[2] / "tutorial/example_rm_auto_grader/rm_auto_grader_tiny.yaml"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AstunerConfig]:
    for name in ("DASHSCOPE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(writer, "DATA", tmp_path / "data")
    server = grading_server.server(0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    overrides = [f"astuner.task_judge.llm.base_url={url}", f"astuner.task_judge.llm.cache_dir={tmp_path / 'cache'}"]
    yield load_config(CONFIG, overrides).config.astuner
    server.shutdown()
    thread.join()
    server.server_close()


async def test_the_learned_rubrics_tell_the_forms_of_answers_apart(config: AstunerConfig):
    rubrics = load_rubrics(config, CONFIG.parent, [Path.cwd()], None)
    assert set(rubrics.rubrics) == {grading_server.RIGHT, grading_server.REASON}
    assert (rubrics.agreement, rubrics.epochs) == (1.0, 2)
    grader = make_grader(config.task_judge, rubrics)
    try:
        rewards = []
        for style in range(len(writer.STYLES)):
            task = WorkflowTask(Task("t", "", metadata={"main_query": writer.question(3, 4)}), "e")
            output = WorkflowOutput(metadata={"final_answer": writer.answer(style, 3, 4)})
            rewards.append((await grader.compute_reward(task, output)).reward)
    finally:
        grader.close()
    assert rewards == [1.0, 0.0, 0.0, 0.0]


def test_the_tasks_of_training_and_validation_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "DATA", tmp_path)
    training = set(writer.training_file().read_text().splitlines())
    validation = set(writer.validation_file().read_text().splitlines())
    assert (len(training), len(validation), training & validation) == (64, 17, set())


def test_the_file_of_references_has_the_samples_of_the_agent():
    rows = [json.loads(line) for line in (CONFIG.parent / "rubrics_train.jsonl").read_text().splitlines()]
    assert rows == writer.references()
