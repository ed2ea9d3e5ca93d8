"""The rewards of an environment's agents, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from astuner.schema import AgentStep


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return each step's discounted return: its reward plus `gamma` times the next step's return.

    Args:
        rewards: the rewards of the steps, in order.
        gamma: the discount of a step, from 0 to 1.
    """
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


@dataclass
class SeatTurn:
    """A turn of a seat: its LLM calls, from index `first_call` to before `end_call`, and the reward until its next one.

    The calls are those that led to one action, including summaries of the history. `state` is the observation.
    """

    seat: str
    first_call: int
    end_call: int = 0
    reward: float = 0.0
    state: str = ""


@dataclass
class SeatRewards:
    """The turns of an environment's seats, in order, with their rewards.

    A reward that a seat receives in the turn of another one belongs to its own last turn, which led to it.
    """

    turns: list[SeatTurn] = field(default_factory=list)
    # Rewards of seats that have not acted yet.
    _early: dict[str, float] = field(default_factory=dict)

    def start_turn(self, seat: str, n_calls: int, state: str) -> None:
        """Start a turn with the observation `state`; the episode has `n_calls` LLM calls so far."""
        self.end_turn(n_calls)
        self.turns.append(SeatTurn(seat, n_calls, n_calls, self._early.pop(seat, 0.0), state))

    def end_turn(self, n_calls: int) -> None:
        """End the last turn, if there is one."""
        if self.turns:
            self.turns[-1].end_call = n_calls

    def add(self, reward: float | Mapping[str, float]) -> None:
        """Add a step's reward: a number for the seat that has acted, or several seats' rewards by name."""
        acted = self.turns[-1].seat
        for seat, value in (reward if isinstance(reward, Mapping) else {acted: reward}).items():
            last = next((turn for turn in reversed(self.turns) if turn.seat == seat), None)
            if last is None:
                self._early[seat] = self._early.get(seat, 0.0) + value
            else:
                last.reward += value

    def total(self, seat: str, gamma: float) -> float:
        """Return a seat's total reward, where `gamma` discounts a reward once for each earlier turn of the seat."""
        return self._returns(gamma).get(seat, [self._early.get(seat, 0.0)])[0]

    def steps(self, gamma: float) -> list[AgentStep]:
        """Return one step for each LLM call, with its seat's discounted rewards from the call's turn on."""
        returns = {seat: iter(values) for seat, values in self._returns(gamma).items()}
        by_turn = [(turn, AgentStep(turn.state, next(returns[turn.seat]))) for turn in self.turns]
        return [step for turn, step in by_turn for _ in range(turn.first_call, turn.end_call)]

    def _returns(self, gamma: float) -> dict[str, list[float]]:
        """Return, for each seat, the discounted rewards from each of its turns on."""
        rewards: dict[str, list[float]] = {}
        for turn in self.turns:
            rewards.setdefault(turn.seat, []).append(turn.reward)
        return {seat: discounted_returns(values, gamma) for seat, values in rewards.items()}
