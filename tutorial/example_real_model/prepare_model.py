"""Create the starting model of equations.yaml, legs.yaml and products.yaml.

SmolLM2-135M-Instruct gets a short supervised training on transcripts of the agents' conversations, with tasks of the
training split. In most transcripts, the answer follows at once. In the others, it is worked out step by step, or with
the calculator. The model is cached in the user's cache folder under a name that contains a hash of this recipe.
"""

import random
from pathlib import Path

from tutorial.example_real_model import agents, smollm2, tasks
from tutorial.example_real_model.agents import CALCULATOR, calculate, conversation
from tutorial.example_real_model.tasks import EQUATIONS, LEGS, PRODUCTS, Generator
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "smollm2_warm",
    renderer="auto",
    dtype="bfloat16",
    batch=8,
    lr=1e-4,
    prompt_loss_weight=0.0,
    validation_transcripts=16,
)
TRANSCRIPTS = {EQUATIONS.name: 104, LEGS.name: 104, PRODUCTS.name: 56}
AT_ONCE = 0.6
"""The share of transcripts that give the answer at once."""


def warm_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    sources = [Path(__file__), *(Path(module.__file__) for module in (agents, smollm2, tasks))]
    return starting_model(RECIPE, transcripts, sources, smollm2.smollm2)


def transcripts() -> list[dict]:
    """Return the transcripts of all generators in random order."""
    rng = random.Random(RECIPE.seed)
    rows = []
    for generator in (EQUATIONS, LEGS, PRODUCTS):
        count = TRANSCRIPTS[generator.name]
        # The tasks after those of the run.
        for number, task in enumerate(generator.tasks("train", tasks.TRAINING_TASKS, count)):
            rows.append(transcript(generator, task, at_once=number < AT_ONCE * count))
    rng.shuffle(rows)
    return rows


def transcript(generator: Generator, task: dict, *, at_once: bool) -> dict:
    """Return a conversation whose last line is the answer to a task."""
    messages, last = conversation(task["question"]), f"Answer: {task['answer']}"
    if generator.work_out is not None:
        steps = [] if at_once else generator.work_out(task["question"])
        return {"messages": [*messages, {"role": "assistant", "content": "\n".join([*steps, last])}]}
    if not at_once:
        expression = task["question"].partition(":")[2].partition(".")[0].strip()
        call = {"name": CALCULATOR["function"]["name"], "arguments": {"expression": expression}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "name": call["name"], "content": calculate(expression)},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": last}], "tools": [CALCULATOR]}


if __name__ == "__main__":
    print(warm_model())
