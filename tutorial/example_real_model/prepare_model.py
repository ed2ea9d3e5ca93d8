"""Create the starting model of real_model.yaml.

SmolLM2-135M-Instruct gets a short supervised training on transcripts of the agent's conversations, with tasks of the
training split that the run does not use. In most transcripts, the agent answers at once. In the others, it calls the
calculator. The model is cached in the user's cache folder under a name that contains a hash of this recipe.
"""

import random
from pathlib import Path

from tutorial.example_real_model import agents, smollm2, tasks
from tutorial.example_real_model.agents import CALCULATOR, calculate, conversation
from tutorial.example_real_model.tasks import EQUATIONS, LEGS, SUMS, Generator
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "smollm2_warm",
    renderer="auto",
    dtype="fastest",
    batch=8,
    lr=3e-4,
    prompt_loss_weight=0.0,
    validation_transcripts=16,
)
CALCULATED = {SUMS.name: 16, EQUATIONS.name: 60, LEGS.name: 140}
"""Number of transcripts with the calculator, by generator."""
CALCULATED_SHARE = 0.25
"""Share of the transcripts with the calculator in all transcripts."""


def warm_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    sources = [Path(__file__), *(Path(module.__file__) for module in (agents, smollm2, tasks))]
    return starting_model(RECIPE, transcripts, sources, smollm2.smollm2)


def transcripts() -> list[dict]:
    """Return the transcripts of all generators in random order."""
    rng = random.Random(RECIPE.seed)
    rows = []
    for generator in (SUMS, EQUATIONS, LEGS):
        calculated = CALCULATED[generator.name]
        # The tasks after those of the run.
        for number, task in enumerate(
            generator.tasks("train", tasks.TRAINING_TASKS, round(calculated / CALCULATED_SHARE))
        ):
            rows.append(transcript(generator, task, at_once=number >= calculated))
    rng.shuffle(rows)
    return rows


def transcript(generator: Generator, task: dict, *, at_once: bool) -> dict:
    """Return a conversation that ends with the answer to a task."""
    messages = conversation(task["question"])
    if not at_once:
        expression = generator.expression(task["question"])
        call = {"name": CALCULATOR["function"]["name"], "arguments": {"expression": expression}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "name": call["name"], "content": calculate(expression)},
        ]
    messages.append({"role": "assistant", "content": f"Answer: {task['answer']}"})
    return {"messages": messages, "tools": [CALCULATOR]}


if __name__ == "__main__":
    print(warm_model())
