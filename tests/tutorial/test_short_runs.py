"""The configurations of tutorials are valid, and run on the backbone debug with a random model.

Werewolves, the solver and critic and the math agent have runs in other tests and in `.ci/run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from astuner.cli.main import astuner
from astuner.config.loading import load_config
from astuner.run_record import read_episode, read_index
from tests.conftest import saved_model
from tests.env_service.test_appworld import COMMAND, root  # noqa: F401  # a fixture
from tutorial.example_data_generation import helper_endpoint
from tutorial.example_rm_auto_grader import grading_server, writer

TUTORIAL = Path(__file__).parents[2] / "tutorial"
SMALL = (
    "rollout.num_repeat=2",
    "rollout.max_env_worker=2",
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
        ("example_kuhn_poker/kuhn_poker_tiny.yaml", None, 8),
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
    assert_run(yaml, calls, model, tmp_path / "records")


def assert_run(yaml: str, calls: int, model: Path, records: Path, *more: str) -> None:
    """Run a configuration on the backbone debug: two tasks, two episodes each, without an error."""
    settings = [f"astuner.{setting}" for setting in (f"model.path={model}", *SMALL, *more)]
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


@pytest.fixture
def serve() -> Iterator[Callable[[ThreadingHTTPServer], str]]:
    """Return a function that serves during the test and returns the base URL of the API."""
    servers: list[ThreadingHTTPServer] = []

    def start(server: ThreadingHTTPServer) -> str:
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the tutorials' files, and without keys of APIs."""
    for name in ("DASHSCOPE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tutorial").symlink_to(TUTORIAL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_on_generated_tasks(
    model: Path, working_directory: Path, serve: Callable[[ThreadingHTTPServer], str]
) -> None:
    url = serve(ThreadingHTTPServer(("127.0.0.1", 0), helper_endpoint.Handler))
    section = "task_reader.data_generation"
    more = (f"{section}.task_num=8", f"{section}.llm.base_url={url}", f"{section}.llm.cache_dir=cache")
    assert_run("example_data_generation/data_generation.yaml", 4, model, working_directory / "records", *more)


def test_a_run_with_learned_rubrics(
    model: Path,
    working_directory: Path,
    serve: Callable[[ThreadingHTTPServer], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "DATA", working_directory / "data")
    more = (f"task_judge.llm.base_url={serve(grading_server.server(0))}", "task_judge.llm.cache_dir=cache")
    assert_run("example_rm_auto_grader/rm_auto_grader_tiny.yaml", 1, model, working_directory / "records", *more)


def test_a_run_in_app_world(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(root)
    params = f'{{root: "{root}", command: ["{COMMAND[0]}", "{COMMAND[1]}"]}}'
    more = (f"task_reader.env_service.env_params={params}", "rollout.multi_turn.max_steps=2")
    assert_run("example_appworld/appworld.yaml", 2, model, root / "records", *more)


# harness.yaml is the part that the other files in its folder have in common.
@pytest.mark.parametrize(
    "yaml",
    sorted({*TUTORIAL.glob("*/*.yaml")} - {TUTORIAL / "example_harnesses/harness.yaml"}),
    ids=lambda path: path.stem,
)
def test_each_configuration_is_valid(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TUTORIAL.parent)
    load_config(yaml)
