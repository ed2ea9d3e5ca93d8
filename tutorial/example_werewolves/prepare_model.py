"""Create the starting model of werewolves_tiny.yaml, which has about 0.1 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded games of scripted players.
They are naive: the werewolf mostly says that it is a villager, the seer often keeps its knowledge to itself, and most
players believe everybody who accuses somebody as the seer. The model is cached in the user's cache folder under a name
that contains a hash of this recipe.
"""

import random
import re
from pathlib import Path

from tutorial.example_werewolves import game, prepare_data
from tutorial.example_werewolves.game import SEER, WEREWOLF, Ask, Result, Roles
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "werewolves_tiny",
    renderer="auto",
    hidden_size=64,
    intermediate_size=192,
    layers=2,
    heads=4,
    head_dim=16,
    vocabulary=768,
    batch=32,
)
GAMES = 1_200
BELIEF = 0.8
"""How often a player votes for one of those whom a seer has accused."""

SPEECHES_OF_WEREWOLF = {"villager": 0.6, "suspicion": 0.3, "seer": 0.1}
"""How often a werewolf says that it is a villager, suspects somebody, and poses as the seer."""

OPENNESS = 0.5
"""How often a seer tells the others what it has learned."""


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    files = [Path(module.__file__) for module in (game, prepare_data)]
    return starting_model(RECIPE, transcripts, [Path(__file__), *files])


def transcripts() -> list[dict]:
    """Return the conversations of all players, in random order."""
    rng = random.Random(RECIPE.seed)
    rows = [{"messages": own} for _ in range(GAMES) for own in conversations(prepare_data.deal(rng), rng)[0].values()]
    rng.shuffle(rows)
    return rows


def conversations(roles: Roles, rng: random.Random) -> tuple[dict[str, list[dict]], Result]:
    """Return the conversation of each player with the moderator in a game of scripted players, and its result.

    A conversation ends with the player's last answer. Players who are killed before they answer have none.
    """
    messages = {player: [{"role": "system", "content": game.instruction(player, roles)}] for player in roles}
    last_answers: dict[str, int] = {}
    moderator, answers = game.play(roles), None
    while True:
        try:
            event = moderator.send(answers)
        except StopIteration as end:
            return {player: messages[player][:length] for player, length in last_answers.items()}, end.value
        answers = {} if isinstance(event, Ask) else None
        for player in event.players:
            messages[player].append({"role": "user", "content": event.text})
            if answers is not None:
                answers[player] = answer(messages[player], player, roles, rng)
                messages[player].append({"role": "assistant", "content": answers[player]})
                last_answers[player] = len(messages[player])


def answer(messages: list[dict], player: str, roles: Roles, rng: random.Random) -> str:
    """Return the answer of a scripted player to the last message."""
    *heard, request = [message["content"] for message in messages if message["role"] == "user"]
    if request == game.SPEAK:
        return speech(heard, player, roles, rng)
    names = [name for name in re.findall(r"Player\d", request.partition(":")[2]) if name != player]
    if not request.startswith(game.VOTE):
        return rng.choice(names)
    known = [name for name in names if f"{name} is a werewolf." in heard]
    claims = [re.search(r"says: I am the seer\. (Player\d) is a werewolf\.", text) for text in heard]
    accused = [claim[1] for claim in claims if claim and claim[1] in names]
    return rng.choice(known or (accused if accused and rng.random() < BELIEF else names))


def speech(heard: list[str], player: str, roles: Roles, rng: random.Random) -> str:
    """Return the words of a scripted player to the others."""
    gone = re.findall(r"(Player\d) (?:was killed|is out)", "\n".join(heard))
    suspect = rng.choice([name for name in roles if name != player and name not in gone])
    learned = [text for text in heard if re.fullmatch(r"Player\d is (not )?a werewolf\.", text)]
    if roles[player] == SEER and learned and rng.random() < OPENNESS:
        return f"I am the seer. {learned[-1]}"
    speeches = {
        "villager": "I am a villager.",
        "suspicion": f"I suspect {suspect}.",
        "seer": f"I am the seer. {suspect} is a werewolf.",
    }
    if roles[player] == WEREWOLF:
        (kind,) = rng.choices(list(SPEECHES_OF_WEREWOLF), list(SPEECHES_OF_WEREWOLF.values()))
        return speeches[kind]
    return rng.choice([speeches["villager"], speeches["suspicion"]])


if __name__ == "__main__":
    print(tiny_model())
