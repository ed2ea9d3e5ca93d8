"""MiniGrid and BabyAI: worlds of grid cells, described as text."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium
import minigrid
from minigrid.utils.baby_ai_bot import BabyAIBot

from astuner.env_service.adapters.gymnasium_base import GymnasiumEnvironment, usable
from astuner.errors import EnvError, did_you_mean, short_repr

VIEWS = ("description", "grid")
_MAX_STATES = 6000
_MAX_SEARCHES = 5000

if "MiniGrid-Empty-8x8-v0" not in gymnasium.registry:
    minigrid.register_minigrid_envs()


def names() -> Sequence[str]:
    """Return the ids of the environments that can be created here."""
    return usable(MiniGridEnvironment, _ids())


def _ids() -> list[str]:
    return [name for name, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("minigrid.")]


class MiniGridEnvironment(GymnasiumEnvironment):
    """An environment of MiniGrid or BabyAI. A task is a world with its mission; its score is 1 if the mission succeeds.

    Steps have MiniGrid's rewards, which are smaller the more steps the mission took.

    Args:
        env_id: its id, such as `MiniGrid-DoorKey-5x5-v0` or `BabyAI-GoToRedBall-v0`.
        view: `description` describes what the agent sees in front of it; `grid` shows the whole world as text.
        options: those of `GymnasiumEnvironment`.

    Raises:
        EnvError: there is no such id, or an argument is invalid.
    """

    action_names = ("left", "right", "forward", "pickup", "drop", "toggle", "done")

    def __init__(self, env_id: str, view: str = "description", **options: Any) -> None:
        if env_id not in (ids := _ids()):
            hint = did_you_mean(env_id, ids, show=str) or "`astuner env list` shows the names"
            raise EnvError(f"MiniGrid has no environment {short_repr(env_id)}; {hint}")
        if view not in VIEWS:
            raise EnvError(f"view is {short_repr(view)}; expected {' or '.join(VIEWS)}")
        self._view = view
        super().__init__(env_id, **options)

    def opened(self, seed: int, env: Any = None) -> tuple[Any, Any]:
        """Return an environment with the world of the seed."""
        with contextlib.redirect_stdout(io.StringIO()):  # BabyAI prints the worlds that it rejects
            return super().opened(seed, env)

    def content(self, env: Any, observation: Any) -> str:
        """Return the world and the mission."""
        return f"{env.unwrapped.mission}\n{env.unwrapped.pprint_grid()}"

    def step_limit(self, env: Any) -> int | None:
        """Return the number of steps after which a task ends. It differs between the tasks of some environments."""
        return self._step_limit or int(env.unwrapped.max_steps)

    def instruction(self, env: Any) -> str:
        """Return the rules and the mission."""
        if self._view == "grid":
            seen = (
                "Each turn you see the world, with two letters for a cell. >>, VV, << or ^^ is you, and where you look."
                " W is a wall, G the goal, K a key, A a ball, B a box, V lava and F floor. D is a closed door, L a "
                "locked one and __ an open one. The second letter is the first one of the colour."
            )
        else:
            seen = "Each turn you see what is in front of you and beside you, up to a few cells away."
        return (
            f"You are in a world of grid cells. Your mission: {env.unwrapped.mission}. {seen}\nThe actions left and "
            "right turn you by 90 degrees. forward moves you by one cell. pickup takes the object in the cell in front "
            "of you, and drop puts it down there. toggle opens or closes the door or box in front of you; a locked "
            "door needs the key of its colour in your hand. done says that you have reached a door or an object, if "
            "that is the mission."
        )

    def solved(self, env: Any, reward: float, terminated: bool) -> bool:
        """Return whether the mission succeeded."""
        return terminated and reward > 0

    def solution(self, env: Any) -> list[int] | None:
        """Return the actions of BabyAI's bot, or the shortest ones in MiniGrid; None if the search is too long."""
        if hasattr(env.unwrapped, "instrs"):
            return self._bot_solution(env)
        # Few missions need an object to be put down, and without that there are far fewer states.
        for actions in ((0, 1, 2, 3, 5, 6), range(7)):
            world = self.opened(env.np_random_seed)[0].unwrapped
            world.gen_obs = dict  # the search needs no observations, which take most of the time
            plan = _search(world, actions)
            if plan is not None and self._succeeds(env, plan):
                return plan
        return None

    def _text(self, env: Any, observation: Any) -> str:
        return str(env.unwrapped.pprint_grid()) if self._view == "grid" else describe_view(env.unwrapped)

    def _bot_solution(self, env: Any) -> list[int] | None:
        plan: list[int] = []
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                bot = _BoundedBot(env)
                while len(plan) < int(env.unwrapped.max_steps):
                    plan.append(int(bot.replan()))
                    _, reward, terminated, truncated, _ = env.step(plan[-1])
                    if terminated or truncated:
                        return plan if self.solved(env, float(reward), bool(terminated)) else None
            except Exception:  # the bot cannot carry out every mission, and fails with any error
                return None
        return None

    def _succeeds(self, env: Any, plan: Sequence[int]) -> bool:
        """Return whether a plan works in the world as it was before the search, with its randomness."""
        env, _ = self.opened(env.np_random_seed)
        results = [env.step(action) for action in plan]
        return self.solved(env, float(results[-1][1]), bool(results[-1][2]))


create = MiniGridEnvironment


class _BoundedBot(BabyAIBot):  # type: ignore[misc]
    """BabyAI's bot, with a limit to its searches for paths: in some worlds it searches without end."""

    def _breadth_first_search(self, *arguments: Any, **options: Any) -> Any:
        if self.bfs_counter > _MAX_SEARCHES:
            raise RuntimeError(f"the bot searched for {_MAX_SEARCHES} paths")
        return super()._breadth_first_search(*arguments, **options)


def describe_view(world: Any) -> str:
    """Describe what the agent of a `MiniGridEnv` sees and carries."""
    view, visible = world.gen_obs_grid()
    middle, front = view.width // 2, view.height - 1
    seen: list[tuple[int, str]] = []
    walls: dict[str, int] = {}
    for column in range(view.width):
        for row in range(view.height):
            cell, side, ahead = view.get(column, row), column - middle, front - row
            if cell is None or not visible[column, row] or (side, ahead) == (0, 0):
                continue
            distance = abs(side) + ahead
            if cell.type != "wall":
                seen.append((distance, f"{_object_name(cell)} {_place(side, ahead)}"))
            elif not side or not ahead:
                direction = _place(side, ahead)
                kind = direction.partition(" ")[2].removeprefix("s ").split()[-1]
                walls[kind] = min(distance, walls.get(kind, distance))
    lines = [text for _, text in sorted(seen)]
    lines += [f"a wall {distance} step{'s' if distance > 1 else ''} {kind}" for kind, distance in sorted(walls.items())]
    carried = _object_name(world.carrying) if world.carrying else "nothing"
    return "\n".join(["You see:", *(f"- {line}" for line in lines), f"You carry {carried}."])


def _object_name(cell: Any) -> str:
    state = ("open " if cell.is_open else "locked " if cell.is_locked else "closed ") if cell.type == "door" else ""
    return f"a {state}{cell.color} {cell.type}"


def _place(side: int, ahead: int) -> str:
    parts = [(ahead, "forward"), (abs(side), "left" if side < 0 else "right")]
    return " and ".join(f"{count} step{'s' if count > 1 else ''} {where}" for count, where in parts if count)


def _search(world: Any, actions: Sequence[int]) -> list[int] | None:
    """Return the shortest actions that end with a positive reward, or None. The world is left in another state."""
    doors = [cell for cell in world.grid.grid if cell is not None and cell.type == "door"]
    first = _saved(world, doors)
    queue, plans = deque([first]), {_key(first): list[int]()}
    while queue and len(plans) < _MAX_STATES:
        state = queue.popleft()
        plan = plans[_key(state)]
        for action in actions:
            world.agent_pos, world.agent_dir, world.carrying, doors_state, cells = state
            world.grid.grid = list(cells)
            world.step_count = 0
            for door, (is_open, is_locked) in zip(doors, doors_state, strict=True):
                door.is_open, door.is_locked = is_open, is_locked
            _, reward, terminated, _, _ = world.step(action)
            if terminated:
                if reward > 0:
                    return [*plan, action]
                continue
            after = _saved(world, doors)
            if _key(after) not in plans:
                plans[_key(after)] = [*plan, action]
                queue.append(after)
    return None


def _saved(world: Any, doors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the state of a world: the agent's position and direction, what it carries, the doors and the cells."""
    position = tuple(map(int, world.agent_pos))
    doors_state = tuple((door.is_open, door.is_locked) for door in doors)
    return position, int(world.agent_dir), world.carrying, doors_state, tuple(world.grid.grid)


def _key(state: tuple[Any, ...]) -> tuple[Any, ...]:
    *agent, carrying, doors, cells = state
    return *agent, id(carrying), doors, tuple(map(id, cells))
