"""The configurations of tutorials run on the backbone debug, with a random model in place of the starting model.

Werewolves, the solver and critic and the math agent have runs in other tests and in `.ci/run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astuner.cli import astuner
from astuner.run_record import read_episode, read_index
from tests.conftest import saved_model

TUTORIAL = Path(__file__).parents[2] / "tutorial"
SMALL = (
    "rollout.num_repeat=2",
    "rollout.max_response_length_in_one_turn=4",
    "rollout.max_model_len=4000",
    "data.train_batch_size=2",
    "data.max_prompt_length=2000",
    "data.max_response_length=2000",
    "debug.debug_first_n_tasks=2",
)


@pytest.fixture(scope="module")
def model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose context holds the prompts of the tutorials, which are long for the tests' tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "model"
    return saved_model(tokenizer, folder, hidden_size=32, head_dim=16, context=4096)


@pytest.mark.parametrize(
    ("yaml", "data", "calls"),
    [
        ("example_countdown/countdown_tiny.yaml", "countdown.prepare_data.FOLDER", 1),
        ("example_learning_to_ask/learning_to_ask_tiny.yaml", "learning_to_ask.prepare_data.FOLDER", 5),
        ("example_feedback_tracing/feedback_tracing.yaml", "feedback_tracing.make_traces.FILE", 4),
        ("example_frozenlake/frozenlake_tiny.yaml", None, 8),
        ("example_real_model/real_model.yaml", "real_model.tasks.FOLDER", 3),
        ("example_real_model/sums.yaml", "real_model.tasks.FOLDER", 1),
    ],
)
def test_a_run(
    yaml: str, data: str | None, calls: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "frozenlake" in yaml:
        pytest.importorskip("gymnasium")
    if "real_model" in yaml:
        pytest.importorskip("reasoning_gym")
    if data is not None:
        monkeypatch.setattr(f"tutorial.example_{data}", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    settings = [f"astuner.{setting}" for setting in (f"model.path={model}", *SMALL)]
    records = tmp_path / "records"
    arguments = ["--conf", str(TUTORIAL / yaml), "--backbone=debug", "--exp-dir", str(records), *settings]
    astuner.main(arguments, standalone_mode=False)
    (record,) = [folder for folder in records.iterdir() if folder.is_dir()]
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    # A game of a random model may end at `max_steps`.
    assert [episode.status for episode in episodes] == ["ok"] * 4, [episode.error for episode in episodes]
    assert len({episode.task.task_id for episode in episodes}) == 2
    for episode in episodes:
        assert 1 <= len(episode.calls) <= calls
        assert episode.reward is not None
