"""Create the starting model of rm_auto_grader_tiny.yaml: a tiny model that uses all forms of answers equally often."""

import random
from pathlib import Path

from tutorial.example_rm_auto_grader import writer
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "rm_auto_grader_tiny",
    hidden_size=96,
    intermediate_size=288,
    layers=2,
    head_dim=24,
    context=256,
    validation_transcripts=32,
    prompt_loss_weight=0.0,
)
TRANSCRIPTS = 8_000


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    return starting_model(RECIPE, transcripts, [Path(__file__), Path(writer.__file__)])


def transcripts() -> list[dict]:
    rng = random.Random(RECIPE.seed)
    rows = []
    for _ in range(TRANSCRIPTS):
        a, b = rng.choice(writer.questions())
        style = rng.randrange(len(writer.STYLES))
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": writer.question(a, b)},
                    {"role": "assistant", "content": writer.answer(style, a, b)},
                ]
            }
        )
    return rows


if __name__ == "__main__":
    print(tiny_model())
