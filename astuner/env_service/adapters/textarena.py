"""The games of TextArena (package textarena) for one, two and more players."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import nltk
import numpy as np
import textarena

from astuner.env_service.adapters.textarena_faults import fault_of, faults, games, require_data
from astuner.env_service.environment import Environment
from astuner.errors import EnvError, describe_error, short_repr
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile

__all__ = ["TextArenaGame", "create", "faults", "names", "seat"]

_MAX_PLAYERS = 15
_MAX_TASKS = 1 << 20
_LISTING = re.compile(r"(?:available|valid|legal) (?:actions|moves|targets)(?: are)?:(.*)", re.IGNORECASE)


def seat(player: int) -> str:
    """Return the name of a player in observations, rewards and the configuration."""
    return f"player_{player}"


def names() -> Sequence[str]:
    """Return the ids of the games that can be played on this machine without a network."""
    faulty = faults()
    return tuple(game for game in games() if game not in faulty)


class TextArenaGame(Environment):
    """A game of TextArena. A task is a seed of the game.

    The game's own rules apply, also to invalid actions: most games accept one, ask for another and end at the second.
    The players are named `player_0`, `player_1` and so on. Games for one player have no names and one reward.

    Args:
        game: its id in TextArena, for example `KuhnPoker-v0`.
        num_players: the number of players; None is the smallest number that the game accepts.
        train_tasks, validation_tasks: the number of tasks in the splits, at most 1,048,576.
        seed: selects the tasks, 0 to 1023.
        settings: the game's own parameters, for example `max_rounds`.

    Raises:
        EnvError: there is no such game, it cannot be played on this machine, or a number is not valid.
    """

    def __init__(
        self,
        game: str,
        *,
        num_players: int | None = None,
        train_tasks: int = 1000,
        validation_tasks: int = 100,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        registry = textarena.envs.registration.ENV_REGISTRY
        if game not in registry:
            raise EnvError(f"TextArena has no game {short_repr(game)}; `astuner env list` shows the games")
        fault = fault_of(registry[game])
        if fault is not None:
            raise EnvError(f"textarena/{game} cannot be played on this machine: {fault}")
        for name, value, lowest, highest in (
            ("num_players", num_players, 1, _MAX_PLAYERS),
            ("train_tasks", train_tasks, 1, _MAX_TASKS),
            ("validation_tasks", validation_tasks, 1, _MAX_TASKS),
            ("seed", seed, 0, 1023),
        ):
            if value is not None and (type(value) is not int or not lowest <= value <= highest):
                raise EnvError(
                    f"{name} of textarena/{game} is {short_repr(value)}; expected an integer from {lowest} to {highest}"
                )
        self._counts = {"train": train_tasks, "validation": validation_tasks}
        self._seed = seed
        self._id = game
        self._players = (num_players,) if num_players else tuple(range(1, _MAX_PLAYERS + 1))
        self._settings = settings
        self._game: Any = None
        self._randomness: tuple[Any, Any] | None = None
        self._is_valid = True
        self._legal: tuple[str, ...] = ()

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the ids of the tasks: their numbers, from 0."""
        if split not in self._counts:
            raise EnvError(f"there is no split {short_repr(split)}; the splits are {', '.join(self._counts)}")
        return [str(number) for number in range(self._counts[split])]

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the description of a task. With several players, each one's prompt is in its first observation.

        An object that plays a task must not be asked for another one.
        """
        self._start(split, task_id)
        number = self.num_players
        if number == 1:
            query = "\n\n".join(text for _, text, kind in self._messages() if kind is _kind().PROMPT)
        else:
            query = f"You play a game with {number} players. Your message is your action in the game."
        reference = _reference(self._id, self._game.state)
        return TaskProfile(task_id, query, metadata={"num_players": number}, reference=reference)

    @property
    def num_players(self) -> int:
        """The number of players in the started task."""
        return int(self._game.state.num_players)

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Start the game. `seed` determines the randomness after its start."""
        self._start(split, task_id)
        with self._isolated():
            _set_seeds(f"{task_id}/{seed}")
        return self._observation(skip_prompt=self.num_players == 1)

    def step(self, action: Action) -> StepResult:
        """Give an action to the game, as the player whose turn it is.

        Raises:
            EnvError: the game has ended.
        """
        state = self._game.state
        if state.done:
            raise EnvError(f"textarena/{self._id} has ended; it accepts no further action")
        self._is_valid = True
        with self._isolated():
            done, info = self._game.step(action if isinstance(action, str) else json.dumps(dict(action)))
        if self._is_valid:
            self._legal = ()
        rewards = self._rewards()
        reward = rewards if len(rewards) > 1 else rewards[seat(0)]
        return StepResult(self._observation(), reward, bool(done), self._is_valid, _plain(info))

    def evaluate(self) -> Evaluation:
        """Return the rewards of the players, 0 until the game ends. One player succeeds with a reward of at least 1."""
        rewards = self._rewards()
        details = {seat(player): _plain(values) for player, values in self._game.state.game_info.items()}
        if len(rewards) > 1:
            return Evaluation(rewards, details=details)
        return Evaluation(rewards[seat(0)], rewards[seat(0)] >= 1, details)

    def _rewards(self) -> dict[str, float]:
        rewards = self._game.state.rewards or {}
        return {seat(player): float(rewards.get(player, 0.0)) for player in range(self.num_players)}

    def _start(self, split: str, task_id: str) -> None:
        """Create the game, with the first number of players that it accepts."""
        if task_id not in self.task_ids(split):
            raise EnvError(f"textarena/{self._id} has no task {short_repr(task_id)} in split {split}")
        seed = (self._seed << 21) + (list(self._counts).index(split) << 20) + int(task_id)
        rejections = []
        for players in self._players:
            self._randomness = None
            try:
                with self._isolated():
                    _set_seeds(str(seed))
                    self._game = textarena.make(self._id, **self._settings)
                    self._game.reset(num_players=players, seed=seed)
            except (EnvError, OSError):
                raise
            except Exception as error:  # games reject a number of players with various errors
                rejections.append(f"{players} players: {describe_error(error)}")
                continue
            # Some games ignore the number, others have no lower limit.
            if players == self.num_players and (
                players > 1 or isinstance(self._game.state, textarena.SinglePlayerState)
            ):
                self._record_invalid_moves()
                return
            rejections.append(f"{players} players: the game has {self.num_players}")
        raise EnvError(f"textarena/{self._id} could not be started: {'; '.join(rejections[:4])}")

    def _record_invalid_moves(self) -> None:
        # The state forgets an invalid move within the step.
        state = self._game.state
        set_invalid_move = state.set_invalid_move

        def record(*args: Any, **kwargs: Any) -> Any:
            self._is_valid = False
            if len(args) == 2 and isinstance(args[1], str):
                args = args[::-1]  # some games of textarena 0.7.4 pass the reward first
            result = set_invalid_move(*args, **kwargs)
            if len(set(getattr(state, "elimination_order", ()))) == state.num_players and not state.done:
                state.set_draw("All players were eliminated.")  # textarena 0.7.4 would search a next player for ever
            return result

        state.set_invalid_move = record

    def _messages(self) -> list[tuple[int, str, Any]]:
        """Return what the player whose turn it is has not yet seen: sender, text and kind."""
        game = self._game
        while isinstance(game, textarena.Wrapper):  # their observations repeat the whole game
            game = game.env
        with self._isolated():
            return list(game.get_observation()[1])

    def _observation(self, *, skip_prompt: bool = False) -> Observation:
        state, single = self._game.state, self.num_players == 1
        player = state.current_player_id
        shown = []
        for sender, text, kind in self._messages():
            # The agent's own action is in its history. Games for one player do not always name its sender.
            own = kind is _kind().PLAYER_ACTION and (single or sender == player)
            if own or (skip_prompt and kind is _kind().PROMPT):
                continue
            if kind is _kind().PROMPT:
                shown.append(text)
            else:
                name = "GAME" if sender == textarena.GAME_ID else state.role_mapping.get(sender, f"Player {sender}")
                shown.append(f"[{name}] {text}")
        text = "\n".join(shown)
        self._legal = _legal_actions(text) or self._legal
        return Observation(text, "" if single else seat(player), self._legal)

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        """Give the game its own random numbers and no downloads, and drop what it prints."""
        outside = (random.getstate(), np.random.get_state())
        if self._randomness is not None:
            random.setstate(self._randomness[0])
            np.random.set_state(self._randomness[1])
        download, nltk.download = nltk.download, require_data
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            nltk.download = download
            self._randomness = (random.getstate(), np.random.get_state())
            random.setstate(outside[0])
            np.random.set_state(outside[1])


create = TextArenaGame


def _kind() -> Any:
    return textarena.ObservationType


def _legal_actions(text: str) -> tuple[str, ...]:
    """Return the actions from an observation's last list of legal ones, as the game writes them."""
    listings = _LISTING.findall(text)
    if not listings:
        return ()
    bracketed = re.findall(r"\[[^\[\]]+\]", listings[-1])
    if bracketed:  # "[raise X]" is a form of actions, not an action
        return tuple(action for action in bracketed if not re.fullmatch(r"\[[a-z]+ [A-Z]\]", action))
    return tuple(item.strip(" '\".") for item in listings[-1].split(",") if item.strip(" '\"."))


def _set_seeds(seed: str) -> None:
    random.seed(seed)
    np.random.seed(random.getrandbits(32))


def _plain(values: Any) -> Any:
    """Return values as JSON has them; others become text."""
    return json.loads(json.dumps(values, default=str))


def _reference(game: str, state: Any) -> Reference | None:
    """Return a task's solution, for games that know it."""
    secrets: dict[str, Callable[[Mapping[str, Any]], Sequence[str]]] = {
        "GuessTheNumber": lambda values: [str(values["game_number"])],
        "Mastermind": lambda values: [" ".join(map(str, values["secret_code"]))],
        "TowerOfHanoi": lambda values: _hanoi(len(values["towers"]["A"]), "A", "B", "C"),
        "Wordle": lambda values: [values["secret_word"]],
    }
    solution = secrets.get(game.partition("-")[0])
    return Reference(tuple(f"[{action}]" for action in solution(state.game_state))) if solution else None


def _hanoi(disks: int, start: str, spare: str, goal: str) -> list[str]:
    if disks == 0:
        return []
    return [*_hanoi(disks - 1, start, goal, spare), f"{start} {goal}", *_hanoi(disks - 1, spare, start, goal)]
