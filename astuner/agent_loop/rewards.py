"""The rewards of the agents of an environment, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class SeatTurn:
    """A turn of a seat: its LLM calls, from index `first_call` to before `end_call`, and the reward until its next one.

    The calls are those that led to one action, including summaries of the history.
    """

    seat: str
    first_call: int
    end_call: int = 0
    reward: float = 0.0


@dataclass
class SeatRewards:
    """The turns of the seats of an environment, in order, with their rewards.

    A reward that a seat receives in the turn of another one belongs to its own last turn, which led to it.
    """

    turns: list[SeatTurn] = field(default_factory=list)
    # Rewards of seats that have not acted yet.
    _early: dict[str, float] = field(default_factory=dict)

    def start_turn(self, seat: str, n_calls: int) -> None:
        """Start a turn; the episode has `n_calls` LLM calls so far."""
        self.end_turn(n_calls)
        self.turns.append(SeatTurn(seat, n_calls, n_calls, self._early.pop(seat, 0.0)))

    def end_turn(self, n_calls: int) -> None:
        """End the last turn, if there is one."""
        if self.turns:
            self.turns[-1].end_call = n_calls

    def add(self, reward: float | Mapping[str, float]) -> None:
        """Add the reward of a step: that of the seat that has acted, or those of several seats by name."""
        acted = self.turns[-1].seat
        for seat, value in (reward if isinstance(reward, Mapping) else {acted: reward}).items():
            last = next((turn for turn in reversed(self.turns) if turn.seat == seat), None)
            if last is None:
                self._early[seat] = self._early.get(seat, 0.0) + value
            else:
                last.reward += value

    def total(self, seat: str, gamma: float) -> float:
        """Return the rewards of a seat, each discounted by `gamma` for each turn of the seat before it."""
        return self._returns(gamma).get(seat, [self._early.get(seat, 0.0)])[0]

    def of_calls(self, gamma: float) -> list[float]:
        """Return, for each LLM call, the discounted rewards of its seat from the call's turn on."""
        returns = {seat: iter(values) for seat, values in self._returns(gamma).items()}
        return [
            value for turn in self.turns for value in [next(returns[turn.seat])] * (turn.end_call - turn.first_call)
        ]

    def _returns(self, gamma: float) -> dict[str, list[float]]:
        """Return, for each seat, the discounted rewards from each of its turns on."""
        returns: dict[str, list[float]] = {}
        for turn in reversed(self.turns):
            later = returns.setdefault(turn.seat, [])
            later.append(turn.reward + gamma * (later[-1] if later else 0.0))
        return {seat: values[::-1] for seat, values in returns.items()}
