"""The example of traces and feedback: only accepted and corrected answers become tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.backbone.training.run_inputs import with_task_files
from astuner.config.data import MixturePart
from astuner.config.loading import load_config
from astuner.task_reader import read_tasks

CONFIG = Path(__file__).parents[2] / "tutorial/example_feedback_tracing/feedback_tracing.yaml"


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tutorial.example_feedback_tracing.make_traces.FILE", tmp_path / "data" / "traces.jsonl")


@pytest.mark.usefixtures("in_tmp")
def test_the_tasks_have_right_answers() -> None:
    reader = load_config(CONFIG).config.astuner.task_reader
    files = with_task_files(reader, transcripts=False, base_dir=CONFIG.parent, search=[Path.cwd()])
    tasks = read_tasks(files, base_dir=CONFIG.parent, search=[])
    assert len(tasks.training) > 300
    assert len(tasks.validation) == round((len(tasks.training) + len(tasks.validation)) * 0.2)
    for task in (*tasks.training, *tasks.validation):
        expression = task.main_query.removeprefix("What is ").removesuffix("?")
        assert task.metadata["answer"] == f"\\boxed{{{eval(expression)}}}"


@pytest.mark.usefixtures("in_tmp")
def test_traces_in_a_mixture_of_transcripts() -> None:
    reader = load_config(CONFIG).config.astuner.task_reader
    parts = [
        MixturePart(type="feedback_tracing", feedback_tracing=reader.feedback_tracing),
        MixturePart(type="random_dummy"),
    ]
    mixture = reader.model_copy(update={"type": "mixture", "mixture": parts})
    files = with_task_files(mixture, transcripts=True, base_dir=CONFIG.parent, search=[Path.cwd()])
    tasks = read_tasks(files, base_dir=CONFIG.parent, search=[], transcripts=True)
    assert {task.source for task in tasks.training} == {"feedback_tracing", "random_dummy"}
    trained = next(task for task in tasks.training if task.source == "feedback_tracing")
    assert [message["role"] for message in trained.init_messages] == ["system", "user", "assistant"]
