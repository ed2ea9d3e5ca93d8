"""The adapters of Gymnasium and MiniGrid, with the real packages."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

from astuner.env_service import load_environment
from astuner.env_service.adapters.gymnasium import FrozenLakeEnvironment
from astuner.env_service.adapters.seeded import SeededEnvironment, SeededTask
from astuner.env_service.environment import adapter
from astuner.errors import EnvError
from astuner.schema import Action

TOY = ["FrozenLake-v1", "FrozenLake8x8-v1", "Taxi", "CliffWalking", "Blackjack-v1"]
WITH_REFERENCE = [
    *(f"gymnasium/{name}" for name in TOY[:4]),
    "minigrid/MiniGrid-DoorKey-5x5-v0",
    "minigrid/MiniGrid-KeyCorridorS3R1-v0",  # the key has to be dropped
    "minigrid/MiniGrid-GoToDoor-5x5-v0",  # ends with `done`
    "minigrid/BabyAI-PutNextLocalS5N3-v0",
]


def environment(name: str, **params: Any) -> SeededEnvironment:
    loaded = load_environment(name, params)
    assert isinstance(loaded, SeededEnvironment)
    return loaded


def contents(env: SeededEnvironment, split: str, count: int) -> set[str]:
    return {env.task(split, task_id).content for task_id in env.task_ids(split)[:count]}


@pytest.mark.parametrize("name", [*(f"gymnasium/{name}" for name in TOY), "minigrid/MiniGrid-DoorKey-6x6-v0"])
def test_splits_have_no_task_in_common_whatever_the_seeds(name: str) -> None:
    train = contents(environment(name), "train", 60) | contents(environment(name, seed=1), "train", 60)
    validation = contents(environment(name), "validation", 60) | contents(environment(name, seed=9), "validation", 60)
    assert len(train) > 10
    assert len(validation) > 10
    assert not train & validation


def test_the_seeds_of_tasks_are_distinct_and_fit_into_32_bits() -> None:
    environments = [environment("gymnasium/CartPole-v1", seed=seed, train_tasks=65_536) for seed in (0, 1, 1023)]
    seeds = [env.task(split, task_id).seed for env in environments for split in env.splits() for task_id in ("0", "99")]
    seeds += [env.task("train", "65535").seed for env in environments]
    assert len(set(seeds)) == len(seeds) == 15
    assert max(seeds) < 2**32


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_the_reference_solves_the_task_and_nothing_before_its_end_does(name: str) -> None:
    env = environment(name)
    for task_id in ("0", "1"):
        reference = env.reference("validation", task_id)
        assert reference is not None
        env.reset("validation", task_id, 3)
        for action in reference.actions:
            assert env.evaluate().score == 0
            result = env.step(action)
            assert result.is_valid
        assert result.is_done
        assert env.evaluate().score == reference.score == 1
        assert env.evaluate().is_success


@pytest.mark.parametrize("name", ["gymnasium/FrozenLake-v1", "gymnasium/FrozenLake8x8-v1"])
def test_the_reference_of_a_lake_is_as_long_as_the_shortest_path(name: str) -> None:
    env = environment(name)
    for task_id in env.task_ids("train")[:20]:
        rows = env.reset("train", task_id, 0).text.split("\n")
        size = len(rows)
        queue, steps = deque([(0, 0)]), {(0, 0): 0}
        while queue:
            row, column = queue.popleft()
            for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if cell not in steps and min(cell) >= 0 and max(cell) < size and rows[cell[0]][cell[1]] != "H":
                    steps[cell] = steps[row, column] + 1
                    queue.append(cell)
        reference = env.reference("train", task_id)
        assert reference is not None
        assert len(reference.actions) == steps[size - 1, size - 1]


def test_a_lake_shows_the_player_and_how_the_task_ended() -> None:
    env = environment("gymnasium/FrozenLake-v1", size=3, frozen=0.5)
    task_id = next(i for i in env.task_ids("train") if env.reset("train", i, 0).text.startswith("PH"))
    text = env.reset("train", task_id, 0).text
    assert text[0] == "P"
    assert text.endswith("G")
    fell = env.step("right")
    assert (fell.is_done, fell.reward) == (True, 0)
    assert fell.observation.text.startswith("SP")
    assert fell.observation.text.endswith("You fell into a hole.")
    assert not env.evaluate().is_success


def test_slippery_ice_has_no_reference_and_slips_by_the_seed_of_the_course() -> None:
    env = environment("gymnasium/FrozenLake8x8-v1", is_slippery=True)
    assert env.reference("train", "0") is None
    assert "slippery" in env.profile("train", "0").main_query

    def course(seed: int) -> list[str]:
        texts = [env.reset("train", "0", seed).text]
        while len(texts) < 20:
            result = env.step("right")
            texts.append(result.observation.text)
            if result.is_done:
                break
        return texts

    courses = [course(seed) for seed in range(6)]
    assert courses == [course(seed) for seed in range(6)]
    assert len({first for first, *_ in courses}) == 1
    assert len({tuple(texts) for texts in courses}) > 1


def test_the_cards_of_blackjack_depend_on_the_seed_of_the_course_but_the_deal_does_not() -> None:
    env = environment("gymnasium/Blackjack-v1")
    task_id = next(i for i in env.task_ids("train") if env.task("train", i).content.startswith("Your sum: 5"))
    deals, draws = set(), set()
    for seed in range(12):
        deals.add(env.reset("train", task_id, seed).text)
        draws.add(env.step("hit").observation.text)
    assert len(deals) == 1
    assert len(draws) > 3
    env.reset("train", task_id, 0)
    assert env.step("stick").is_done
    assert env.evaluate().score in (-1, 0, 1)


@pytest.mark.parametrize(
    "action",
    [
        "down",
        " Down.\n",
        "2",
        "**DOWN**",
        "Action: down",
        "The goal is below, so I should not go left.\nAction: `down`",
        {"name": "act", "arguments": {"action": "down"}},
        {"name": "down", "arguments": {}},
    ],
)
def test_an_action_is_a_name_a_number_the_last_line_or_a_tool_call(action: Action) -> None:
    env = environment("gymnasium/CliffWalking-v1")
    task_id = next(i for i in env.task_ids("train") if "x" in env.task("train", i).content.split("\n")[0])
    env.reset("train", task_id, 0)
    result = env.step(action)
    assert result.is_valid
    assert "x" in result.observation.text.split("\n")[1]


@pytest.mark.parametrize(
    ("form", "action", "is_valid"),
    [
        ("box", "It is \\boxed{left}, or \\boxed{ down }.", True),
        ("box", "\\boxed{\\text{down}}", False),
        ("box", "\\boxed{down", False),
        ("box", "down", True),
        ("box", {"name": "act", "arguments": {"action": "down"}}, True),
        ("code", "I think:\n```text\ndown\n```\nThis is it.", True),
        ("code", "```\nleft\n```\n```\ndown```", True),
        ("code", "```\ndown and left\n```", False),
        ("code", "down", True),
        ("text", "\\boxed{down}", False),
    ],
)
def test_the_preferred_form_is_asked_for_and_read(form: Any, action: Action, is_valid: bool) -> None:
    env = environment("gymnasium/FrozenLake-v1")
    env.action_preference = form
    asked = {"box": "Put it in \\boxed{}.", "code": "Put it in a code block.", "text": "put it on the last line."}
    assert env.profile("train", "0").main_query.endswith(asked[form])
    env.reset("train", "0", 0)
    assert env.step(action).is_valid is is_valid


@pytest.mark.parametrize(
    "action",
    [
        *("", "go", "4", "-1", "down or left", "down\nno, wait", "downwards", "¤"),
        *({"name": "fly", "arguments": {}}, {"name": "act", "arguments": {}}, {"name": "act"}, {}),
        {"name": "act", "arguments": "down"},
    ],
)
def test_other_texts_are_invalid_cost_a_step_and_change_nothing(action: Action) -> None:
    env = environment("gymnasium/FrozenLake-v1", max_steps=2)
    first = env.reset("train", "0", 0)
    result = env.step(action)
    assert not result.is_valid
    assert not result.is_done
    assert first.text in result.observation.text
    assert "left, down, right, up" in result.observation.text
    last = env.step(action)
    assert last.is_done
    assert last.info["truncated"]
    assert env.evaluate().score == 0


def test_numbers_are_observations_and_actions_of_other_environments() -> None:
    cart = environment("gymnasium/CartPole-v1")
    assert len(cart.reset("train", "0", 0).text.split()) == 4
    assert "Action Space" in cart.profile("train", "0").main_query
    assert cart.step("1").reward == 1
    pendulum = environment("gymnasium/Pendulum-v1", invalid_reward=-20)
    assert "a number from -2 to 2" in pendulum.profile("train", "0").main_query
    pendulum.reset("train", "0", 0)
    assert pendulum.step("-1.5").is_valid
    assert pendulum.step("I push: 0.5").is_valid is False
    assert pendulum.step("7").reward == -20
    assert pendulum.evaluate().score < -40


def test_a_return_above_the_threshold_is_a_success_only_at_the_end() -> None:
    car = environment("gymnasium/MountainCar-v0", max_steps=3)
    car.reset("train", "0", 0)
    car.step("1")
    assert car.evaluate().is_success is False
    car.step("?")
    assert car.step("?").is_done
    assert car.evaluate().is_success is False


class _Drawn(gymnasium.Env[int, int]):
    """A row of cells with a coloured player, and observations that are images."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
    action_space = gymnasium.spaces.Discrete(2, start=-1)
    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)  # type: ignore[assignment]

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(1000))
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += action
        return self.observation_space.sample(), float(action), False, False, {}

    def render(self) -> Any:
        return f"..\x1b[41m{self.place}\x1b[0m..\n"


class _Image(_Drawn):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012


@pytest.fixture
def registered() -> Any:
    gymnasium.register("Drawn-v0", _Drawn)
    gymnasium.register("Image-v0", _Image)
    yield
    del gymnasium.registry["Drawn-v0"], gymnasium.registry["Image-v0"]


@pytest.mark.usefixtures("registered")
def test_a_drawing_is_the_observation_with_its_coloured_part_in_brackets() -> None:
    env = environment("gymnasium/Drawn-v0", train_tasks=5)
    text = env.reset("train", "0", 0).text
    assert text == f"..[{int(text.strip('.[]'))}].."
    assert env.step("-1").observation.text == f"..[{int(text.strip('.[]')) - 1}]..\nReward: -1"
    assert not env.step("1").is_valid
    assert env.profile("train", "0").main_query.endswith("-1, 0. If you write more, put it on the last line.")


@pytest.mark.usefixtures("registered")
def test_images_are_refused_and_not_listed() -> None:
    with pytest.raises(EnvError, match=r"12,288 numbers, such as an image; expected text"):
        load_environment("gymnasium/Image-v0")
    listed = adapter("gymnasium").names()
    assert "Drawn-v0" in listed
    assert "Image-v0" not in listed
    assert {"FrozenLake-v1", "FrozenLake8x8-v1", "Blackjack-v1"} <= set(listed)
    assert not [name for name in listed if "MiniGrid" in name]


def test_minigrid_is_described_as_the_agent_sees_it() -> None:
    env = environment("minigrid/MiniGrid-DoorKey-5x5-v0")
    task_id = next(i for i in env.task_ids("train") if "- a yellow key 1 step forward" in env.reset("train", i, 0).text)
    text = env.reset("train", task_id, 0).text
    assert text.startswith("You see:\n- a")
    assert "locked yellow door" in text or "wall" in text
    assert text.endswith("You carry nothing.")
    assert env.step("pickup").observation.text.endswith("You carry a yellow key.")
    profile = env.profile("train", task_id)
    assert "use the key to open the door and then get to the goal" in profile.main_query
    assert profile.max_steps == 250


def test_minigrid_can_show_the_whole_grid() -> None:
    env = environment("minigrid/MiniGrid-Empty-Random-5x5-v0", view="grid")
    rows = env.reset("train", "0", 0).text.split("\n")
    assert [len(row) for row in rows] == [10] * 5
    assert sum(row.count("GG") for row in rows) == 1
    with pytest.raises(EnvError, match="view is 'map'; expected description or grid"):
        load_environment("minigrid/MiniGrid-Empty-5x5-v0", {"view": "map"})


def test_a_world_with_one_layout_has_it_in_both_splits() -> None:
    env = environment("minigrid/MiniGrid-Empty-5x5-v0")
    assert contents(env, "train", 3) == contents(env, "validation", 3)


class _OneLake(FrozenLakeEnvironment):
    """A lake whose tasks are all the same."""

    def generate(self, seed: int) -> SeededTask:
        return replace(super().generate(0), seed=seed)


def test_too_few_distinct_tasks_for_two_splits_are_an_error_where_they_can_be_avoided() -> None:
    env = _OneLake("FrozenLake-v1")
    errors = []
    for split in env.splits():
        try:
            env.profile(split, "0")
        except EnvError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "the environment makes too few distinct tasks for two splits" in errors[0]


def test_there_is_no_reference_if_the_search_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment("minigrid/MiniGrid-DoorKey-5x5-v0")
    assert env.reference("train", "0") is not None
    monkeypatch.setattr("astuner.env_service.adapters.minigrid._MAX_STATES", 3)
    assert env.reference("train", "0") is None


def test_a_bot_that_searches_without_end_gives_no_reference() -> None:
    assert environment("minigrid/BabyAI-UnlockToUnlock-v0").reference("validation", "0") is None


def test_minigrid_lists_what_can_be_created() -> None:
    listed = adapter("minigrid").names()
    assert {"MiniGrid-DoorKey-5x5-v0", "BabyAI-BossLevel-v0"} <= set(listed)
    assert len(listed) > 150


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("gymnasium/FrozenLake-v7", {}, "did you mean FrozenLake-v1"),
        ("gymnasium/zzz", {}, "`astuner env list` shows the names"),
        ("minigrid/MiniGrid-DoorKey-9x9-v0", {}, "did you mean MiniGrid-DoorKey-"),
        ("gymnasium/Taxi", {"seed": 1024}, "seed is 1024; expected an integer from 0 to 1023"),
        ("gymnasium/Taxi", {"seed": True}, "seed is True"),
        ("gymnasium/Taxi", {"train_tasks": 0}, "train_tasks is 0"),
        ("gymnasium/Taxi", {"validation_tasks": 65_537}, "validation_tasks is 65537"),
        ("gymnasium/Taxi", {"max_steps": 0}, "max_steps is 0"),
        ("gymnasium/FrozenLake-v1", {"size": 1}, "size is 1; expected an integer from 3 to 32"),
        ("gymnasium/FrozenLake-v1", {"frozen": 0}, "frozen is 0"),
        ("gymnasium/CartPole-v1", {"nonsense": 1}, "nonsense"),
        ("gymnasium/Reacher-v5", {}, "could not be created"),
    ],
)
def test_wrong_names_and_parameters_are_errors(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        load_environment(name, params)


def test_an_environment_is_played_from_reset_to_close() -> None:
    env = environment("gymnasium/FrozenLake-v1", train_tasks=3)
    assert list(env.task_ids("train")) == ["0", "1", "2"]
    with pytest.raises(EnvError, match="call reset first"):
        env.step("left")
    with pytest.raises(EnvError, match="no split 'test'; the splits are train, validation"):
        env.task_ids("test")
    for unknown in ("3", "-1", "01", "x", "٣", ""):
        with pytest.raises(EnvError, match="its tasks are 0 to 2"):
            env.reset("train", unknown, 0)
    reference = env.reference("train", "2")
    assert reference is not None
    env.reset("train", "2", 0)
    for action in reference.actions:
        env.step(action)
    with pytest.raises(EnvError, match="the task has ended"):
        env.step("left")
    env.reset("train", "1", 0)
    assert not env.step("left").is_done
    env.close()
    for use in (lambda: env.step("left"), env.evaluate, lambda: env.reset("train", "0", 0)):
        with pytest.raises(EnvError, match="closed"):
            use()
