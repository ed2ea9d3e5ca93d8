"""Create the starting model of kuhn_poker_tiny.yaml: a tiny model that chooses legal actions about uniformly.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on games of two uniform players. The
model is cached in the user's cache folder under a name that contains a hash of this recipe.
"""

import random
from pathlib import Path

from tutorial.example_kuhn_poker import kuhn_poker
from tutorial.example_kuhn_poker.kuhn_poker import KuhnPoker, answer_with, card_of, instruction_of
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "kuhn_poker_tiny",
    renderer="auto",
    hidden_size=64,
    intermediate_size=192,
    layers=2,
    head_dim=16,
    context=1024,
    validation_transcripts=64,
    lr=1e-3,
    prompt_loss_weight=0.0,
)
GAMES = 2_000


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    return starting_model(RECIPE, transcripts, [Path(__file__), Path(kuhn_poker.__file__)])


def transcripts() -> list[dict]:
    """Return the conversations of both players in games of uniform players, as the agent loop has them.

    The players first name their card and then choose the action in a box, which is all that the opponent sees.
    """
    environment, rng = KuhnPoker(train_tasks=GAMES), random.Random(RECIPE.seed)
    rows = []
    for task_id in environment.task_ids("train"):
        instruction = instruction_of(environment)
        observation, is_done = environment.reset("train", task_id, 0), False
        conversations: dict[str, list[dict]] = {}
        while not is_done:
            messages = conversations.setdefault(observation.agent, [])
            text = observation.text if messages else f"{instruction}\n\n{observation.text}"
            action = rng.choice(observation.legal_actions)
            answer = answer_with(card_of(messages[0]["content"] if messages else text), action)
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            result = environment.step(action)
            observation, is_done = result.observation, result.is_done
        rows += [{"messages": messages} for messages in conversations.values()]
    rng.shuffle(rows)
    return rows


if __name__ == "__main__":
    print(tiny_model())
