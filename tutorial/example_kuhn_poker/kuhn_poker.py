"""Kuhn poker with its usual payoffs, as an environment and as a game tree, and the exploitability of a policy.

TextArena 0.7.4 does not add bets to the pot, so that a call costs nothing. `KuhnPoker` gives the payoffs that the
game's own prompt describes: the winner gets 2 chips from the loser if a bet was called, and otherwise 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.env_service.adapters.textarena import TextArenaGame, seat
from astuner.schema import Action, Evaluation, Observation, StepResult
from astuner.workflows.agent_loop import ActionReader, ScriptedPlayer

FIRST, SECOND = seat(1), seat(0)
"""The player who acts first in TextArena's game of one round, and the other one."""
CARDS = "JQK"

InformationSet = tuple[str, str]
"""The card of a player, and the actions so far by their initials, for example `("Q", "cb")`."""

Policy = Mapping[InformationSet, float]
"""The probability of the second action (bet or call) in each of the 12 information sets."""


class KuhnPoker(TextArenaGame):
    """One round of Kuhn poker. The rewards are chips: 1 or 2 for the winner, and as many less for the loser."""

    def __init__(self, **params: Any) -> None:
        """Take the parameters of `TextArenaGame` other than the game."""
        super().__init__("KuhnPoker-v0", max_rounds=1, **params)
        self._has_call = False

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Deal."""
        self._has_call = False
        return super().reset(split, task_id, seed)

    def step(self, action: Action) -> StepResult:
        """Play an action."""
        result = super().step(action)
        self._has_call = result.is_valid and result.is_done and "call" in str(action).lower()
        return StepResult(result.observation, self._chips(result.reward), result.is_done, result.is_valid, result.info)

    def evaluate(self) -> Evaluation:
        """Return the chips of the players."""
        evaluation = super().evaluate()
        return Evaluation(self._chips(evaluation.score), details=evaluation.details)

    def _chips(self, rewards: Any) -> dict[str, float]:
        return {player: (2 if self._has_call else 1) * reward for player, reward in rewards.items()}


class Cautious(ScriptedPlayer):
    """Bets and calls with a king, and otherwise checks and folds."""

    card = ""

    async def act(self, observation: Observation) -> Action:
        """Return the action."""
        self.card = card_of(observation.text) or self.card
        return observation.legal_actions[actions(observation).index(1 if self.card == "K" else 0)]


def card_of(text: str) -> str:
    """Return the card that an observation deals; "" if it deals none."""
    return next((card for card in CARDS if f"Your card is: '{card}'" in text), "")


def answer_with(card: str, action: str) -> str:
    """Return the answer with which the tiny model chooses an action."""
    return f"{card} \\boxed{{{action[1:-1]}}}"


def instruction_of(environment: KuhnPoker) -> str:
    """Return the instruction of the agent loop for all tasks."""
    return f"{environment.profile('train', '0').main_query}\n\n{ActionReader('box').instruction}"


def actions(observation: Observation) -> list[int]:
    """Return for each legal action whether it is the passive one (0: check, fold) or the other one (1: bet, call)."""
    return [int(action in ("[bet]", "[call]")) for action in observation.legal_actions]


def information_sets() -> list[InformationSet]:
    """Return the 12 information sets: those of the first player, and those of the second."""
    return [(card, history) for history in ("", "cb", "c", "b") for card in CARDS]


def is_first(history: str) -> bool:
    """Return whether the first player acts after a history."""
    return len(history) % 2 == 0


def payoff(cards: Sequence[str], history: str) -> float | None:
    """Return the chips that the first player wins at the end of a game, or None if it has not ended.

    Args:
        cards: those of the first and the second player.
        history: the initials of the actions: check, bet, fold, call; a call is `k`.
    """
    higher = 1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1
    return {"cc": higher, "bk": 2 * higher, "cbk": 2 * higher, "bf": 1, "cbf": -1}.get(history)


def next_history(history: str, choice: int) -> str:
    """Return the history after the passive choice (0) or the other one (1)."""
    return history + ("fk" if history.endswith("b") else "cb")[choice]


def value(first: Policy, second: Policy) -> float:
    """Return the chips that the first player wins on average in a game."""
    deals = list(itertools.permutations(CARDS, 2))
    return sum(_value(deal, "", first, second) for deal in deals) / len(deals)


def _value(cards: Sequence[str], history: str, first: Policy, second: Policy) -> float:
    result = payoff(cards, history)
    if result is not None:
        return result
    own = first[cards[0], history] if is_first(history) else second[cards[1], history]
    return sum(
        probability * _value(cards, next_history(history, choice), first, second)
        for choice, probability in ((0, 1 - own), (1, own))
        if probability > 0
    )


def best_response_value(policy: Policy, *, as_first: bool) -> float:
    """Return the chips that the best response to a policy wins on average, as the first or as the second player.

    The best of all 2^6 deterministic policies is a best response.
    """
    own = [info for info in information_sets() if is_first(info[1]) == as_first]
    responses = (dict(zip(own, choices, strict=True)) for choices in itertools.product((0.0, 1.0), repeat=len(own)))
    if as_first:
        return max(value(response, policy) for response in responses)
    return max(-value(policy, response) for response in responses)


def exploitability(policy: Policy) -> float:
    """Return the chips that best responses win on average against a policy; 0 for a Nash equilibrium.

    The mean is over the two positions. The policy's own value cancels out, because the game is zero-sum.
    """
    return (best_response_value(policy, as_first=True) + best_response_value(policy, as_first=False)) / 2


def equilibrium(alpha: float) -> dict[InformationSet, float]:
    """Return the Nash equilibrium in which the first player bets with a jack with probability `alpha`, 0 to 1/3.

    Source: H. W. Kuhn, A simplified two-person poker, 1950.
    """
    first = {("J", ""): alpha, ("Q", ""): 0.0, ("K", ""): 3 * alpha}
    first |= {("J", "cb"): 0.0, ("Q", "cb"): alpha + 1 / 3, ("K", "cb"): 1.0}
    second = {("J", "c"): 1 / 3, ("Q", "c"): 0.0, ("K", "c"): 1.0, ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0}
    return first | second


def uniform() -> dict[InformationSet, float]:
    """Return the policy that chooses both actions with the same probability."""
    return dict.fromkeys(information_sets(), 0.5)


def cautious() -> dict[InformationSet, float]:
    """Return the policy of `Cautious`."""
    return {info: float(info[0] == "K") for info in information_sets()}


def observations(task_ids: Sequence[str], environment: KuhnPoker) -> dict[InformationSet, list[Observation]]:
    """Return the observations of the acting player up to each information set, from the deals of tasks.

    Raises:
        ValueError: the tasks do not contain all deals.
    """
    found: dict[InformationSet, list[Observation]] = {}
    for task_id in task_ids:
        for choices in ((), (0,), (1,), (0, 1)):
            seen: dict[str, list[Observation]] = {FIRST: [], SECOND: []}
            observation = environment.reset("train", task_id, 0)
            history = ""
            for choice in choices:
                seen[observation.agent].append(observation)
                action = observation.legal_actions[actions(observation).index(choice)]
                observation = environment.step(action).observation
                history = next_history(history, choice)
            seen[observation.agent].append(observation)
            card = card_of(seen[observation.agent][0].text)
            found.setdefault((card, history), seen[observation.agent])
        if len(found) == 12:
            return found
    raise ValueError(f"the tasks contain only {len(found)} of the 12 information sets")
