"""The rules of Werewolves, without agents: a generator that asks the players and announces the events."""

import re
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

WEREWOLF, SEER, VILLAGER = "werewolf", "seer", "villager"

SPEAK = "Speak to the others."
VOTE = "Vote for a player to be out."

Roles = Mapping[str, str]
"""The role of each player by name, in the order in which the players speak."""


@dataclass(frozen=True)
class Tell:
    """A message of the moderator to some of the players."""

    players: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Ask(Tell):
    """A message that players answer at the same time, without hearing each other."""


@dataclass(frozen=True)
class Result:
    """The result of a game: the side that has won, and the number of days."""

    werewolves_win: bool
    days: int


Answers = Mapping[str, str]
"""The answers to an `Ask`, by player."""

Game = Generator[Tell, Answers | None, Result]
"""Yields each message of the moderator, receives the answers to an `Ask`, and returns the result."""


def instruction(player: str, roles: Roles) -> str:
    """Return the system prompt of a player: the rules, and what the player knows."""
    werewolves = [name for name, role in roles.items() if role == WEREWOLF]
    rules = (
        f"You play Werewolves. Players: {', '.join(roles)}. Werewolves among them: {len(werewolves)}. "
        "Each night, the werewolves kill a player, and the seer learns whether a player is a werewolf. "
        "Each day, all players speak and then vote, and the player with the most votes is out. "
        "The werewolves win when they are as many as the others. The others win when no werewolf is left."
    )
    known = f" The werewolves are {', '.join(werewolves)}." if roles[player] == WEREWOLF else ""
    return f"{rules}\nYou are {player}, a {roles[player]}.{known}"


def play(roles: Roles) -> Game:
    """Play a game. It lasts at most as many days as there are players; then the werewolves win."""
    alive = list(roles)
    for day in range(1, len(roles) + 1):
        victim = yield from _night(day, alive, roles)
        alive = [player for player in alive if player != victim]
        yield Tell(tuple(alive), f"Day {day}. {victim or 'Nobody'} was killed.")
        if (werewolves_win := _winner(alive, roles)) is None:
            yield from _speeches(alive)
            out = yield from _vote(alive)
            alive = [player for player in alive if player != out]
            werewolves_win = _winner(alive, roles)
        if werewolves_win is not None:
            return Result(werewolves_win, day)
    return Result(werewolves_win=True, days=len(roles))


def _night(day: int, alive: Sequence[str], roles: Roles) -> Generator[Tell, Answers | None, str | None]:
    """Return the player that the werewolves kill: the choice of the last werewolf who names one."""
    victim = None
    victims = [player for player in alive if roles[player] != WEREWOLF]
    for werewolf in (player for player in alive if roles[player] == WEREWOLF):
        choice = f" Your partner chooses {victim}." if victim else ""
        answers = yield from _ask([werewolf], f"Night {day}.{choice} Whom do you kill? {_one_of(victims)}")
        victim = named(answers[werewolf], victims) or victim
    for seer in (player for player in alive if roles[player] == SEER):
        others = [player for player in alive if player != seer]
        answers = yield from _ask([seer], f"Night {day}. Whom do you look at? {_one_of(others)}")
        if seen := named(answers[seer], others):
            yield Tell((seer,), f"{seen} {'is' if roles[seen] == WEREWOLF else 'is not'} a werewolf.")
    return victim


def _speeches(alive: Sequence[str]) -> Generator[Tell, Answers | None, None]:
    for player in alive:
        answers = yield from _ask([player], SPEAK)
        others = tuple(other for other in alive if other != player)
        yield Tell(others, f"{player} says: {' '.join(answers[player].split())}")


def _vote(alive: Sequence[str]) -> Generator[Tell, Answers | None, str | None]:
    """Return the player with the most votes, or None if there is a tie or no vote."""
    answers = yield from _ask(alive, f"{VOTE} {_one_of(alive)}")
    votes = {player: named(answers[player], [name for name in alive if name != player]) for player in alive}
    counts = Counter(vote for vote in votes.values() if vote).most_common(2)
    is_decided = len(counts) == 1 or (len(counts) == 2 and counts[0][1] > counts[1][1])
    out = counts[0][0] if is_decided else None
    cast = ", ".join(f"{player} for {vote or 'nobody'}" for player, vote in votes.items())
    yield Tell(tuple(alive), f"Votes: {cast}. {out or 'Nobody'} is out.")
    return out


def _ask(players: Sequence[str], text: str) -> Generator[Tell, Answers | None, Answers]:
    answers = yield Ask(tuple(players), text)
    if answers is None:
        raise ValueError(f"the moderator asked {', '.join(players)} and received no answers")
    return answers


def _one_of(players: Iterable[str]) -> str:
    return f"Answer with a name: {', '.join(players)}."


def _winner(alive: Sequence[str], roles: Roles) -> bool | None:
    """Return whether the werewolves have won, or None if the game goes on."""
    werewolves = sum(roles[player] == WEREWOLF for player in alive)
    if werewolves == 0:
        return False
    return True if 2 * werewolves >= len(alive) else None


def named(answer: str, players: Sequence[str]) -> str | None:
    """Return the player whom an answer names last, or None if it names none of `players`."""
    found = re.findall(rf"\b(?:{'|'.join(map(re.escape, players))})\b", answer)
    return found[-1] if found else None
