"""Episodes with an environment: `workflow_task.env`, its judge, and its release whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.backbone.episode_workers.rollout import make_rollout, with_workers
from astuner.backbone.training.run_inputs import load_agent_inputs
from astuner.config.data import EnvServiceConfig, TaskReaderConfig
from astuner.errors import TaskDataError
from astuner.llm_engine.scripted import ScriptedEngine
from astuner.model_tuner import CallSettings
from astuner.schema import Episode, Task
from astuner.task_reader import read_tasks
from astuner.task_rollout import ActiveEpisodes, BatchRequest, TaskRollout
from tests.env_service import players
from tests.env_service.services import Service, serving, wait_until

PLAYERS = Path(players.__file__)
JUDGE = "astuner.task_judge.env_service_as_judge->EnvServiceJudge"
Start = Callable[..., TaskRollout]


def read(service: Service, env_type: str = "guess", **settings: Any) -> list[Task]:
    reader = EnvServiceConfig(env_type=env_type, env_url=service.address.url, **settings)
    config = TaskReaderConfig(type="env_service", env_service=reader)
    return list(read_tasks(config, base_dir=Path(), search=[]).training)


@pytest.fixture(scope="module")
def new_rollout(model_folder: Path, tokenizer: Any) -> Iterator[Start]:
    """Return a function that starts a rollout of a workflow of `players` with the judge of environments."""

    def begin(workflow: str, isolation: str = "thread", **settings: Any) -> TaskRollout:
        job = AstunerJob(algorithm="grpo", model=model_folder, backbone="local", model__renderer="qwen3", **{
            "rollout__isolation": isolation,
            "rollout__max_env_worker": 2,
            "rollout__episode_timeout": 300.0,
        } | settings)  # fmt: skip
        job.set_workflow(f"{PLAYERS}->{workflow}").set_data("file", "unused.jsonl").set_judge(JUDGE)
        config = job.config.astuner
        inputs = load_agent_inputs(config, (PLAYERS.parent,), str(model_folder))
        ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
        engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=512)
        return make_rollout(config, stack.enter_context(with_workers(config, inputs)), engine, ActiveEpisodes())

    with contextlib.ExitStack() as stack:
        yield begin


@pytest.fixture(scope="module")
def in_processes(new_rollout: Start) -> Iterator[TaskRollout]:
    """A rollout in processes, which all tests share: the process that starts them imports torch."""
    rollout = new_rollout("AsTheTaskSays", "process")
    yield rollout
    rollout.close()


@pytest.fixture
def start(new_rollout: Start, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return a function that returns a rollout of a workflow; its tasks name the workflow."""
    rollouts: list[TaskRollout] = []

    def begin(workflow: str, isolation: str = "thread", **settings: Any) -> TaskRollout:
        if isolation == "process":
            shared: TaskRollout = request.getfixturevalue("in_processes")
            return shared
        rollouts.append(new_rollout(workflow, **settings))
        return rollouts[-1]

    yield begin
    players.released.set()
    for each in rollouts:
        each.close()


def run(rollout: TaskRollout, tasks: list[Task], repeats: int = 1) -> list[Episode]:
    return rollout.run(BatchRequest(tasks, repeats, "train", 1, 0, CallSettings(max_tokens=8, max_calls=5)))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_environment_plays_and_scores(start: Start, service: Service, isolation: str) -> None:
    before = {each["instance_id"] for each in service.instances()}
    tasks = [replace(task, metadata={"player": "Plays"}) for task in read(service)]
    episodes = run(start("Plays", isolation), tasks[:6], repeats=2)
    assert [(episode.status, episode.error) for episode in episodes] == [("ok", None)] * 12
    for episode in episodes:
        solved = episode.metadata["steps"] < 8 or episode.reward == 1.0
        assert episode.reward == float(episode.is_success or False) == float(solved)
    assert {episode.reward for episode in episodes} == {0.0, 1.0}
    assert len({episode.metadata["instance"] for episode in episodes}) == 12
    wait_until(lambda: {each["instance_id"] for each in service.instances()} <= before)


@pytest.mark.parametrize(
    ("workflow", "isolation", "kind", "error", "settings"),
    [
        ("Raises", "thread", "workflow", "the player resigns", {}),
        ("Hangs", "thread", "timeout", "episode_timeout", {"rollout__episode_timeout": 4.0}),
        # The environment must be created within the limit, also on a slow machine.
        ("Blocks", "thread", "timeout", "blocked its thread", {"rollout__episode_timeout": 12.0}),
        ("CancelsItself", "thread", "workflow", "CancelledError", {}),
        ("Exits", "process", "worker", "exited with code 3", {}),
        ("Raises", "process", "workflow", "the player resigns", {}),
    ],
)
def test_a_failed_episode_releases_its_environment(
    start: Start, tmp_path: Path, workflow: str, isolation: str, kind: str, error: str, settings: dict[str, Any]
) -> None:
    # The lease is that of the killed worker. A live one must not miss its heartbeats.
    with serving(tmp_path, f"--lease-seconds={20 if workflow == 'Exits' else 600}") as service:
        rollout = start(workflow, isolation, **{"task_judge__timeout": 3.0} | settings)
        (episode,) = run(rollout, [replace(read(service)[0], metadata={"player": workflow})])
        assert (episode.status, episode.error_kind) == ("failed", kind)
        assert error in str(episode.error)
        wait_until(lambda: not service.instances())


def test_a_fault_of_the_environment_fails_its_episode_only(start: Start, service: Service) -> None:
    tasks = read(service, "faulty")
    (episode,) = run(start("Fails"), tasks[:1])
    assert (episode.status, episode.error_kind) == ("failed", "environment")
    assert "environment faulty, task number-0: step raised RuntimeError: the dice are lost (at " in str(episode.error)
    assert "environments.py" in str(episode.error_traceback)
    # The score after a fault would be one of a broken game.
    (episode,) = run(start("SwallowsTheError"), tasks[:1])
    assert (episode.status, episode.error_kind) == ("failed", "environment")


def test_without_an_environment_the_judge_says_what_is_missing(start: Start) -> None:
    (episode,) = run(start("Plays"), [Task("t", "Guess.")])
    assert episode.error_kind == "workflow"
    (episode,) = run(start("Raises"), [Task("t", "Guess.")])
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
