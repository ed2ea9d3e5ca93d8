"""The base class for Gymnasium environments, with text for actions and observations."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from astuner.env_service.adapters.seeded import SeededEnvironment, SeededTask, action_tool, chosen_action
from astuner.env_service.environment import Environment
from astuner.errors import EnvError, short_repr, shorten
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile

_MAX_NUMBERS = 100
_FORMS = {
    "text": "If you write more, put it on the last line.",
    "box": "Put it in \\boxed{}.",
    "code": "Put it in a code block.",
}
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m")
_SECTIONS = ("Description", "Action Space", "Observation Space", "Rewards", "Episode End", "Episode Termination")


class GymnasiumEnvironment(SeededEnvironment):
    """An environment from Gymnasium. A task is a start, from `reset(seed=...)`; its score is the sum of the rewards.

    Subclasses describe an environment better than its documentation and its own text do.

    Args:
        train_tasks, validation_tasks, seed: see `SeededEnvironment`.
        max_steps: the number of steps after which a task ends; by default, Gymnasium's limit for `env_id`.
        invalid_reward: the reward of an action that is not understood. It leaves the environment unchanged.
        options: the keyword arguments of `gymnasium.make`.

    Raises:
        EnvError: the observations or actions cannot be text, or an argument is out of its bounds.

    Attributes:
        action_names: the names of the actions 0, 1, ..., which are also accepted as numbers.
    """

    has_distinct_tasks = False
    action_names: Sequence[str] = ()

    def __init__(
        self,
        env_id: str,
        train_tasks: int = 1000,
        validation_tasks: int = 100,
        seed: int = 0,
        max_steps: int | None = None,
        invalid_reward: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(train_tasks, validation_tasks, seed)
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise EnvError(f"max_steps is {max_steps!r}; expected a positive integer, or null for no limit")
        self.env_id, self._options, self._invalid_reward = env_id, options, float(invalid_reward)
        spec = gymnasium.spec(env_id)
        entry = spec.entry_point
        creator = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        self.has_drawing = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())
        self._step_limit = max_steps or spec.max_episode_steps
        self._documentation = inspect.getdoc(creator) or ""
        self._threshold = spec.reward_threshold
        self._env: Any = None
        self._shown: Any = None
        self._solved: bool | None = None
        env = self.make()
        self._action_space = env.action_space
        if type(self)._text is GymnasiumEnvironment._text and not self.has_drawing:
            _require_few_numbers(env_id, env.observation_space, "observations")
        if isinstance(self._action_space, spaces.Discrete):
            numbers = range(int(self._action_space.start), int(self._action_space.start + self._action_space.n))
            self.action_names = tuple(self.action_names) or tuple(map(str, numbers))
            self._actions = dict(zip(map(str, numbers), numbers, strict=True))
            self._actions |= {name.lower(): number for name, number in zip(self.action_names, numbers, strict=True)}
        else:
            _require_few_numbers(env_id, self._action_space, "actions")
        env.close()
        self.tools = [action_tool("act", "Perform an action.", "action", self.action_names)]

    def make(self, **settings: Any) -> Any:
        """Return a new `gymnasium.Env`."""
        if self.has_drawing:
            settings["render_mode"] = "ansi"
        if self._step_limit is not None:
            settings["max_episode_steps"] = self._step_limit
        return gymnasium.make(self.env_id, disable_env_checker=True, **{**settings, **self._options})

    def opened(self, seed: int, env: Any = None) -> tuple[Any, Any]:
        """Return a `gymnasium.Env` at the start of a seed's task, and its first observation.

        Args:
            env: an earlier one of this object, to use again; None for a new one.
        """
        env = self.make() if env is None else env
        observation, _ = env.reset(seed=seed)
        return env, observation

    def generate(self, seed: int) -> SeededTask:
        """Return a seed's task, with its first observation's text as the content."""
        env, observation = self.opened(seed, self._shown)
        self._shown = env  # creating one takes longer than resetting it
        return SeededTask(seed, self.content(env, observation), (self.instruction(env), self.step_limit(env)))

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the instruction."""
        task = self.task(split, task_id)
        form = f"Each turn, reply with one action: {self._expected()}. {_FORMS[self.action_preference]}"
        instruction, max_steps = task.data
        metadata = {"id": self.env_id, "seed": task.seed}
        return TaskProfile(task_id, f"{instruction}\n\n{form}", metadata=metadata, max_steps=max_steps)

    def reference(self, split: str, task_id: str) -> Reference | None:
        """Return the shortest solution, if the environment has a table of transitions and no randomness."""
        env, _ = self.opened(self.task(split, task_id).seed)
        actions = self.solution(env)
        env.close()
        return None if actions is None else Reference(tuple(self.action_names[action] for action in actions))

    def start(self, task: SeededTask, seed: int) -> Observation:
        """Reset the environment with the task's seed; `seed` determines its further randomness."""
        if self._env is not None:
            self._env.close()
        self._env, observation = self.opened(task.seed)
        self.max_steps = self.step_limit(self._env)
        self._env.unwrapped.np_random = np.random.default_rng([task.seed, seed % 2**64])
        self._return, self._steps_done, self._solved, self._has_ended = 0.0, 0, None, False
        self._current = self._text(self._env, observation)
        return self._observe(self._current)

    def act(self, action: Action) -> StepResult:
        """Perform an action, given by its name, number or tool call."""
        text = chosen_action(action, self.action_preference, self.action_names, tool="act", argument="action")
        chosen = self._parse(text)
        if chosen is None:
            refusal = f"{short_repr(shorten(text))} is not an action. The actions are: {self._expected()}."
            self._return += self._invalid_reward
            return StepResult(self._observe(f"{refusal}\n\n{self._current}"), self._invalid_reward, is_valid=False)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self._return += float(reward)
        self._steps_done += 1
        self._solved = self.solved(self._env, float(reward), bool(terminated))
        self._current = self._text(self._env, observation)
        text = self._current if self._solved is not None else f"{self._current}\nReward: {float(reward):g}"
        self._has_ended = bool(terminated or truncated)
        info = {"truncated": True} if truncated else {}
        return StepResult(self._observe(text), float(reward), is_done=self._has_ended, info=info)

    def score(self) -> Evaluation:
        """Return whether the task is solved, or the sum of the rewards if the environment does not say that."""
        details = {"return": self._return, "steps": self._steps_done}
        if self._solved is not None or type(self).solved is not GymnasiumEnvironment.solved:
            return Evaluation(float(bool(self._solved)), is_success=bool(self._solved), details=details)
        success = None if self._threshold is None else self._has_ended and self._return >= self._threshold
        return Evaluation(self._return, is_success=success, details=details)

    def close(self) -> None:
        """Close the environment."""
        super().close()
        for env in (self._env, self._shown):
            if env is not None:
                env.close()

    def instruction(self, env: Any) -> str:
        """Return the rules and the goal, from the environment's documentation."""
        parts = re.split(r"^## +(.+)$", self._documentation, flags=re.MULTILINE)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        chosen = [f"{name}:\n{sections[name].strip()}" for name in _SECTIONS if name in sections]
        return "\n\n".join(chosen) or f"You act in the environment {self.env_id}. Collect as much reward as possible."

    def content(self, env: Any, observation: Any) -> str:
        """Return what distinguishes a task from others: the text of the first observation."""
        return self._text(env, observation)

    def step_limit(self, env: Any) -> int | None:
        """Return the number of steps after which a task ends."""
        return self._step_limit

    def _text(self, env: Any, observation: Any) -> str:
        """Return an observation's text; the coloured part of a drawing is put in brackets."""
        if self.has_drawing:
            return _COLOURED.sub(r"[\1]", str(env.render())).strip("\n")
        return _value_text(env.observation_space, observation)

    def solved(self, env: Any, reward: float, terminated: bool) -> bool | None:
        """Return whether a step solved the task; None if the environment only has rewards."""
        return None

    def solution(self, env: Any) -> list[int] | None:
        """Return the actions that solve the task from the current state, or None if they are not known."""
        return None

    def _observe(self, text: str) -> Observation:
        return Observation(text, legal_actions=tuple(self.action_names))

    def _expected(self) -> str:
        if self.action_names:
            return ", ".join(self.action_names)
        if isinstance(self._action_space, spaces.Text):
            return "a text"
        space = self._action_space
        low, high = (
            (space.low, space.high) if isinstance(space, spaces.Box) else (np.zeros(()), np.asarray(space.nvec) - 1)
        )
        bounds = [
            f"{float(least):g} to {float(most):g}"
            for least, most in zip(*(each.reshape(-1) for each in np.broadcast_arrays(low, high)), strict=True)
        ]
        count = "a number" if len(bounds) == 1 else f"{len(bounds)} numbers, separated by spaces,"
        return f"{count} from {bounds[0] if len(set(bounds)) == 1 else ' and '.join(bounds)}"

    def _parse(self, text: str) -> Any:
        """Return the action that a text, or its last line, names; None if it names none."""
        if isinstance(self._action_space, spaces.Text):
            return text if self._action_space.contains(text) else None
        lines = text.splitlines() or [""]
        for candidate in (text, lines[-1]):
            name = re.sub(r"^action\s*:", "", candidate.strip(" \t\n.,;:!?\"'`*()[]{}<>").lower()).strip(" \t\n\"'`*")
            if isinstance(self._action_space, spaces.Discrete):
                if name in self._actions:
                    return self._actions[name]
            elif re.fullmatch(r"[-+0-9.eE\s,]+", name):
                space = self._action_space
                try:
                    values = np.array([float(part) for part in name.replace(",", " ").split()]).reshape(space.shape)
                except ValueError:
                    return None
                values = values.astype(space.dtype)
                return values if space.contains(values) else None
        return None


def usable(create: Callable[[str], Environment], ids: Sequence[str]) -> list[str]:
    """Return the ids whose environments have tasks here: their packages are installed, and they can be text."""
    found = []
    for name in ids:
        # Gymnasium warns of ids that have a newer version.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            create(name).profile("train", "0")
            found.append(name)
    return sorted(found)


def _require_few_numbers(env_id: str, space: Any, what: str) -> None:
    """Raise an error unless the values of a space are texts or a few numbers."""
    numbers = sum(1 if part.shape is None else int(np.prod(part.shape or (1,))) for part in _flat(space))
    if numbers > _MAX_NUMBERS:
        raise EnvError(
            f"the {what} of gymnasium/{env_id} are {numbers:,} numbers, such as an image; expected text, at most "
            f"{_MAX_NUMBERS} numbers, or render_mode 'ansi'"
        )
    if what == "actions" and not isinstance(
        space, spaces.Text | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        raise EnvError(f"the actions of gymnasium/{env_id} are {short_repr(space)}; expected a choice, text or numbers")


def _flat(space: Any) -> list[Any]:
    if isinstance(space, spaces.Tuple):
        return [part for inner in space.spaces for part in _flat(inner)]
    if isinstance(space, spaces.Dict):
        return [part for inner in space.spaces.values() for part in _flat(inner)]
    return [space]


def _value_text(space: Any, value: Any) -> str:
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {_value_text(space[name], value[name])}" for name in space.spaces)
    if isinstance(space, spaces.Tuple):
        return ", ".join(_value_text(inner, part) for inner, part in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Text):
        return str(value)
    return " ".join(f"{float(number):.4g}" for number in np.asarray(value).reshape(-1))
