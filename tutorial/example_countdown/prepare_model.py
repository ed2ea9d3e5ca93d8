"""Create the starting model of countdown_tiny.yaml, which has about 0.2 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded transcripts. In 80% of
them, the answer is a guess: the numbers in random order with random signs. In the others, a search tries one sum after
the other until one has the value of the target. The puzzles of the transcripts belong to the training split. The model
is cached in the user's cache folder under a name that contains a hash of this recipe.
"""

import random
from pathlib import Path

from tutorial.example_countdown import countdown_agent, prepare_data
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "countdown_tiny",
    hidden_size=64,
    intermediate_size=192,
    heads=4,
    head_dim=16,
    context=256,
    vocabulary=512,
    isolated="[0-9]+|[-+=]",
    batch=64,
)
TRANSCRIPTS = 32_000
GUESSES = 0.8


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    files = [Path(module.__file__) for module in (prepare_data, countdown_agent)]
    return starting_model(RECIPE, transcripts, [Path(__file__), *files])


def transcripts() -> list[dict]:
    """Return the transcripts."""
    rng = random.Random(RECIPE.seed)
    training, _ = prepare_data.puzzles()
    return [transcript(puzzle, rng) for puzzle in rng.choices(training, k=TRANSCRIPTS)]


def transcript(puzzle: prepare_data.Puzzle, rng: random.Random) -> dict:
    """Return a conversation in which the assistant guesses or searches."""
    answer = guess(puzzle, rng) if rng.random() < GUESSES else search(puzzle)
    return {
        "messages": [
            {"role": "system", "content": countdown_agent.SYSTEM_PROMPT},
            {"role": "user", "content": prepare_data.make_task(puzzle, rng)["question"]},
            {"role": "assistant", "content": answer},
        ]
    }


def guess(puzzle: prepare_data.Puzzle, rng: random.Random) -> str:
    """Return an answer with the numbers in random order and with random signs."""
    first, second, third = rng.sample(puzzle[0], 3)
    return f"<answer>{first}{rng.choice('+-')}{second}{rng.choice('+-')}{third}</answer>"


def search(puzzle: prepare_data.Puzzle) -> str:
    """Return an answer that evaluates sums in a fixed order until one equals the target."""
    numbers, target = puzzle
    steps = []
    for (first, second, third), value in prepare_data.sums(numbers):
        partial = first + second
        steps.append(f"{first}{second:+d}={partial} {partial}{third:+d}={value}")
        if value == target:
            return "\n".join([*steps, f"<answer>{first}{second:+d}{third:+d}</answer>"])
    raise ValueError(f"{numbers} cannot make {target}")


if __name__ == "__main__":
    print(tiny_model())
