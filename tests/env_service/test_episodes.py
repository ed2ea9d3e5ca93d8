"""Episodes with an environment: `workflow_task.env`, its judge, and its release whatever happens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.backbone.episode_workers.rollout import make_rollout, with_episodes
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.data import EnvServiceConfig, TaskReaderConfig
from astuner.errors import TaskDataError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Task, TaskSet
from astuner.task_reader import read_tasks
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from tests.env_service import players
from tests.env_service.services import Service, serving, wait_until
from tests.scripted_engine import ScriptedEngine

PLAYERS = Path(players.__file__)
JUDGE = "astuner.task_judge.env_service_as_judge->EnvServiceJudge"
Start = Callable[..., TaskRollout]


def read(service: Service, env_type: str = "guess", **settings: Any) -> list[Task]:
    reader = EnvServiceConfig(env_type=env_type, env_url=service.address.url, **settings)
    config = TaskReaderConfig(type="env_service", env_service=reader)
    return list(read_tasks(config, base_dir=Path(), search=[]).training)


@pytest.fixture(scope="module")
def start(model_folder: Path, tokenizer: Any) -> Iterator[Start]:
    """Return a function that returns a rollout with the judge of environments, the same for the same settings.

    Its tasks name a workflow of `players`.
    """
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda **settings: stack.enter_context(started_rollout(model_folder, tokenizer, **settings))
        )


@contextlib.contextmanager
def started_rollout(model_folder: Path, tokenizer: Any, **settings: Any) -> Iterator[TaskRollout]:
    job = AstunerJob(algorithm="grpo", model=model_folder, backbone="local", model__renderer="qwen3", **{
        "rollout__max_env_worker": 2,
        "rollout__episode_timeout": 300.0,
    } | settings)  # fmt: skip
    job.set_workflow(f"{PLAYERS}->AsTheTaskSays").set_data("file", "unused.jsonl").set_judge(JUDGE)
    config = job.config.astuner
    codec = ChatCodec(tokenizer, "qwen3")
    inputs = RunInputs(TaskSet((), ()), str(model_folder), tokenizer, codec, (PLAYERS.parent,))
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=512)
    with with_episodes(config, inputs) as with_pool:
        yield make_rollout(config, with_pool, engine, ActiveEpisodes())


def run(rollout: TaskRollout, tasks: list[Task], repeats: int = 1) -> list[Episode]:
    return rollout.run(BatchRequest(tasks, repeats, "train", 1, 0, CallSettings(max_tokens=8, max_calls=5)))


def test_the_environment_plays_and_scores(start: Start, service: Service) -> None:
    before = {each["instance_id"] for each in service.instances()}
    tasks = [replace(task, metadata={"player": "Plays"}) for task in read(service)]
    episodes = run(start(), tasks[:6], repeats=2)
    assert [(episode.status, episode.error) for episode in episodes] == [("ok", None)] * 12
    for episode in episodes:
        solved = episode.metadata["steps"] < 8 or episode.reward == 1.0
        assert episode.reward == float(episode.is_success or False) == float(solved)
    assert {episode.reward for episode in episodes} == {0.0, 1.0}
    assert len({episode.metadata["instance"] for episode in episodes}) == 12
    wait_until(lambda: {each["instance_id"] for each in service.instances()} <= before)


@pytest.mark.parametrize(
    ("workflow", "kind", "error", "settings"),
    [
        ("Raises", "workflow", "the player resigns", {}),
        ("Hangs", "timeout", "episode_timeout", {"rollout__episode_timeout": 4.0}),
        # The environment must be created within the limit, also on a slow machine.
        ("Blocks", "timeout", "blocked its thread", {"rollout__episode_timeout": 12.0}),
        ("CancelsItself", "workflow", "CancelledError", {}),
    ],
)
def test_a_failed_episode_releases_its_environment(
    start: Start, own_service: Service, workflow: str, kind: str, error: str, settings: dict[str, Any]
) -> None:
    assert_released_after(start(**{"task_judge__timeout": 3.0} | settings), own_service, workflow, kind, error)


def test_the_environment_of_a_worker_that_exits_is_released_when_its_lease_ends(start: Start, tmp_path: Path) -> None:
    with serving(tmp_path, "--lease-seconds=20") as service:
        assert_released_after(start(task_judge__timeout=3.0), service, "Exits", "worker", "exited with code 3")


@pytest.fixture(scope="module")
def own_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without instances from other tests. A worker that lives must not miss its heartbeats."""
    with serving(tmp_path_factory.mktemp("service"), "--lease-seconds=600") as service:
        yield service


def assert_released_after(rollout: TaskRollout, service: Service, workflow: str, kind: str, error: str) -> None:
    (episode,) = run(rollout, [replace(read(service)[0], metadata={"player": workflow})])
    assert (episode.status, episode.error_kind) == ("failed", kind)
    assert error in str(episode.error)
    wait_until(lambda: not service.instances())


@pytest.mark.parametrize("player", ["Hangs", "Talks"])
def test_the_end_of_a_run_releases_the_environments_of_running_episodes(
    model_folder: Path, tokenizer: Any, own_service: Service, player: str
) -> None:
    with started_rollout(model_folder, tokenizer) as rollout, ThreadPoolExecutor(1) as threads:
        running = threads.submit(run, rollout, [replace(read(own_service)[0], metadata={"player": player})])
        wait_until(lambda: bool(own_service.instances()))
        rollout.close()
        with pytest.raises(CancelledError):
            running.result()
    wait_until(lambda: not own_service.instances())


def test_a_fault_of_the_environment_fails_its_episode_only(start: Start, service: Service) -> None:
    tasks = read(service, "faulty")
    (episode,) = run(start(), [replace(tasks[0], metadata={"player": "Fails"})])
    assert (episode.status, episode.error_kind) == ("failed", "environment")
    assert "environment faulty, task number-0: step raised RuntimeError: the dice are lost (at " in str(episode.error)
    assert "environments.py" in str(episode.error_traceback)
    # The score after a fault would be one of a broken game.
    (episode,) = run(start(), [replace(tasks[0], metadata={"player": "SwallowsTheError"})])
    assert (episode.status, episode.error_kind) == ("failed", "environment")


def test_without_an_environment_the_judge_says_what_is_missing(start: Start) -> None:
    (episode,) = run(start(), [Task("t", "Guess.", metadata={"player": "Plays"})])
    assert episode.error_kind == "workflow"
    (episode,) = run(start(), [Task("t", "Guess.", metadata={"player": "Raises"})])
    assert episode.status == "failed"


def test_tasks_carry_what_an_instance_needs(service: Service) -> None:
    tasks = read(service, env_params={"high": 5}, env_action_preference="box", validation_split=None)
    assert len(tasks) == 20
    assert tasks[3].task_id == "number-3"
    assert tasks[3].main_query == "Guess a number from 1 to 5. Answer in the form of box."
    assert tasks[3].metadata == {"high": 5}
    assert tasks[3].env_type == "guess"
    env = tasks[3].env
    assert env is not None
    assert (env.split, env.task_id, env.params, env.url) == ("train", "number-3", {"high": 5}, service.address.url)
    assert replace(env, task_id="").action_preference == "box"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"env_type": "chess"}, r"the service has no environment 'chess'; it serves 'guess', 'async', 'faulty'"),
        ({"training_split": "dev"}, r"there is no split 'dev'; the splits are 'train', 'validation'"),
        ({"env_params": {"size": 3}}, r"could not be created with the parameters \{'size': 3\}: TypeError"),
        ({"env_type": "faulty", "env_params": {"fault": "init"}}, "ValueError: no such mode"),
        ({"env_type": "faulty", "env_params": {"fault": "profile"}}, r"profile raised KeyError: 'no profile' \(at "),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(service: Service, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(TaskDataError, match=f"task_reader.env_service: .*{error}"):
        read(service, **settings)


def test_a_mixture_has_tasks_of_environments(service: Service) -> None:
    environment = {"type": "env_service", "env_service": {"env_type": "guess", "env_url": service.address.url}}
    parts = [environment, {"type": "random_dummy", "weight": 2}]
    config = TaskReaderConfig.model_validate({"type": "mixture", "mixture": parts})
    alone, mixed = read(service), read_tasks(config, base_dir=Path(), search=[]).training
    of_service = [task for task in mixed if task.source == "env_service"]
    assert of_service == [replace(task, task_id=f"env_service/{task.task_id}", source="env_service") for task in alone]
    assert {task.env for task in mixed if task.source == "random_dummy"} == {None}
