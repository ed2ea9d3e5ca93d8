"""Gymnasium: environments whose observations are text, numbers, or drawn as text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from astuner.env_service.adapters.gymnasium_base import GymnasiumEnvironment, usable
from astuner.errors import EnvError, did_you_mean, short_repr


def names() -> Sequence[str]:
    """Return the ids of the environments that can be created here and shown as text."""
    specs = list(gymnasium.registry.values())
    return usable(
        create, [spec.id for spec in specs if not str(spec.entry_point).startswith("minigrid.") and is_latest(spec)]
    )


def is_latest(spec: Any) -> bool:
    """Return whether no later version of an environment is registered."""
    versions = [
        other.version or 0
        for other in gymnasium.registry.values()
        if (other.namespace, other.name) == (spec.namespace, spec.name)
    ]
    return bool((spec.version or 0) == max(versions))


def create(name: str, /, **params: Any) -> GymnasiumEnvironment:
    """Return an environment.

    Args:
        name: its id, such as `FrozenLake-v1`. Without the version, it is the latest.
        params: the parameters of the id's class, below, and keyword arguments for `gymnasium.make`.

    Raises:
        EnvError: there is no such id, or its observations or actions cannot be text.
    """
    spec = gymnasium.registry.get(name)
    if spec is None:
        latest = [each for each in gymnasium.registry.values() if is_latest(each)]
        spec = next((each for each in latest if each.name == name and each.namespace is None), None)
    if spec is None:
        hint = did_you_mean(name, [each.id for each in latest], show=str) or "`astuner env list` shows the names"
        raise EnvError(f"Gymnasium has no environment {short_repr(name)}; {hint}")
    kind = str(spec.entry_point).rpartition(":")[2]
    return _CLASSES.get(kind, GymnasiumEnvironment)(spec.id, **params)


class _TabularEnvironment(GymnasiumEnvironment):
    """An environment with a table of transitions, `P[state][action]`, whose shortest solution can be searched."""

    def solution(self, env: Any) -> list[int] | None:
        """Return the shortest solution; None if a transition is random."""
        table, start = env.unwrapped.P, int(env.unwrapped.s)
        queue, plans = deque([start]), {start: list[int]()}
        while queue:
            state = queue.popleft()
            for action, outcomes in table[state].items():
                possible = [outcome for outcome in outcomes if outcome[0] > 0]
                if len({(after, ended) for _, after, _, ended in possible}) != 1:
                    return None
                _, after, reward, terminated = possible[0]
                plan = [*plans[state], int(action)]
                if self._is_goal(env, int(after), float(reward), bool(terminated)):
                    return plan
                if not terminated and int(after) not in plans:
                    plans[int(after)] = plan
                    queue.append(int(after))
        return None

    def solved(self, env: Any, reward: float, terminated: bool) -> bool:
        """Return whether the goal is reached."""
        return self._is_goal(env, int(env.unwrapped.s), reward, terminated)

    def _is_goal(self, env: Any, state: int, reward: float, terminated: bool) -> bool:
        return terminated


class FrozenLakeEnvironment(_TabularEnvironment):
    """FrozenLake on generated maps that can be solved. A task is a map.

    Args:
        env_id: `FrozenLake-v1`, with maps of 4 x 4 cells, or `FrozenLake8x8-v1`.
        size: the number of rows and columns, 3 to 32; by default, as in `env_id`.
        frozen: the share of ice among the cells, 0.3 to 0.95.
        is_slippery: whether the player moves at a right angle to the action with probability 2/3.
        options: further arguments; see `GymnasiumEnvironment`.
    """

    has_distinct_tasks = True
    action_names = ("left", "down", "right", "up")

    def __init__(
        self, env_id: str, size: int | None = None, frozen: float = 0.8, is_slippery: bool = False, **options: Any
    ) -> None:
        self._size = size if size is not None else 8 if "8x8" in env_id else 4
        self._frozen, self._is_slippery = frozen, is_slippery
        if type(self._size) is not int or not 3 <= self._size <= 32:
            raise EnvError(f"size is {size!r}; expected an integer from 3 to 32")
        if not isinstance(frozen, int | float) or not 0.3 <= frozen <= 0.95:
            raise EnvError(f"frozen is {frozen!r}; expected a number from 0.3 to 0.95")
        super().__init__(env_id, **options)

    def opened(self, seed: int, env: Any = None) -> tuple[Any, Any]:
        """Return an environment with the map of the seed."""
        rows = generate_random_map(self._size, self._frozen, seed)
        env = self.make(desc=rows, is_slippery=self._is_slippery)
        observation, _ = env.reset(seed=seed)
        return env, observation

    def instruction(self, env: Any) -> str:
        """Return the rules."""
        slip = (
            "The ice is slippery: two of three moves go at a right angle to the action. " if self._is_slippery else ""
        )
        return (
            f"You cross a frozen lake of {self._size} x {self._size} cells. In the map, P is you, F is ice, H is a "
            f"hole, G is the goal and S is the start. Reach G without stepping on H. {slip}You stay where you are if a "
            "move leads off the map."
        )

    def _text(self, env: Any, observation: Any) -> str:
        cells = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
        row, column = divmod(int(observation), len(cells[0]))
        under, cells[row][column] = cells[row][column], "P"
        end = {"G": "\nYou reached the goal.", "H": "\nYou fell into a hole."}.get(under, "")
        return "\n".join("".join(row) for row in cells) + end

    def _is_goal(self, env: Any, state: int, reward: float, terminated: bool) -> bool:
        return bool(env.unwrapped.desc.reshape(-1)[state] == b"G")


class CliffWalkingEnvironment(_TabularEnvironment):
    """CliffWalking. A task is a start cell: Gymnasium has one, and here every cell beside the cliff and goal is one."""

    action_names = ("up", "right", "down", "left")

    def opened(self, seed: int, env: Any = None) -> tuple[Any, Any]:
        """Return an environment with the start cell of the seed."""
        env, _ = super().opened(seed, env)
        rows, columns = env.unwrapped.shape
        # The last row is the cliff, but for its first cell.
        env.unwrapped.s = int(np.random.default_rng(seed).integers((rows - 1) * columns + 1))
        return env, env.unwrapped.s

    def instruction(self, env: Any) -> str:
        """Return the rules."""
        transitions = (outcomes for actions in env.unwrapped.P.values() for outcomes in actions.values())
        is_random = any(len(outcomes) > 1 for outcomes in transitions)
        slip = "The ground is slippery: a move may go at a right angle to the action. " if is_random else ""
        return (
            "You walk in a grid with a cliff along the lower edge. In the map, x is you, o is ground, C is the cliff "
            "and T is the goal. Reach T. If you step on the cliff, you are put back to the lower left corner. "
            f"{slip}You stay where you are if a move leads off the map."
        )

    def _text(self, env: Any, observation: Any) -> str:
        return "\n".join(line.strip() for line in str(env.render()).strip().splitlines())


class TaxiEnvironment(_TabularEnvironment):
    """Taxi. A task is the position of the taxi, the passenger and the destination."""

    action_names = ("south", "north", "east", "west", "pickup", "dropoff")

    def instruction(self, env: Any) -> str:
        """Return the rules and the map."""
        rows = "\n".join(b"".join(row).decode() for row in env.unwrapped.desc)
        rain = "It rains: a move may go at a right angle to the action. " if self._options.get("is_rainy") else ""
        return (
            f"You drive a taxi on this map of 5 x 5 cells:\n{rows}\nR, G, Y and B are stops. You can pass ':' but not "
            "'|' or '-'. Row 0 is the northmost one, and column 0 the westmost one. Drive to the passenger, pick the "
            f"passenger up, drive to the destination and drop the passenger off there. {rain}".rstrip()
        )

    def solution(self, env: Any) -> list[int] | None:
        """Return the shortest solution; None if the passenger may change the destination."""
        return None if env.unwrapped.fickle_passenger else super().solution(env)

    def _text(self, env: Any, observation: Any) -> str:
        row, column, passenger, destination = (int(part) for part in env.unwrapped.decode(int(observation)))
        stops = [
            f"{name} (row {stop[0]}, column {stop[1]})" for name, stop in zip("RGYB", env.unwrapped.locs, strict=True)
        ]
        where = f"at {stops[passenger]}" if passenger < len(stops) else "in the taxi"
        return f"Taxi: row {row}, column {column}. Passenger: {where}. Destination: {stops[destination]}."


class BlackjackEnvironment(GymnasiumEnvironment):
    """Blackjack. A task is a deal: the player's first cards and the dealer's open card."""

    action_names = ("stick", "hit")

    def instruction(self, env: Any) -> str:
        """Return the rules."""
        return (
            "You play Blackjack against the dealer. Face cards count 10. An ace counts 1, or 11 if the sum then is at "
            "most 21: a usable ace. You lose with more than 21. Hit takes a card. Stick ends your turn: the dealer "
            "takes cards up to a sum of 17, and the higher sum wins. Cards are drawn with replacement."
        )

    def _text(self, env: Any, observation: Any) -> str:
        total, dealer, usable = (int(part) for part in observation)
        return f"Your sum: {total}{' with a usable ace' if usable else ''}. The dealer's open card: {dealer}."


_CLASSES: dict[str, type[GymnasiumEnvironment]] = {
    "FrozenLakeEnv": FrozenLakeEnvironment,
    "CliffWalkingEnv": CliffWalkingEnvironment,
    "TaxiEnv": TaxiEnvironment,
    "BlackjackEnv": BlackjackEnvironment,
}
