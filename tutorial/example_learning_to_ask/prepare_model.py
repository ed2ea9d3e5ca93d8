"""Create the starting model of learning_to_ask_tiny.yaml, which has about 0.1 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded conversations. In 70% of
them, a careless desk asks up to three random questions, also about what it knows already. In the others, a careful desk
asks what it needs to know. Both then name a department that is possible by the rules. The patients belong to the
training split. The model is cached in the user's cache folder under a name that contains a hash of this recipe.
"""

import random
from pathlib import Path

from tutorial.example_learning_to_ask import clinic, learning_to_ask, prepare_data
from tutorial.example_learning_to_ask.clinic import RULES, TOPICS, departments, needed_topics, statement
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "learning_to_ask_tiny",
    renderer="auto",
    hidden_size=64,
    intermediate_size=192,
    layers=2,
    heads=4,
    head_dim=16,
    context=384,
    vocabulary=768,
    isolated=r"(?<=[.?]) |[0-9]+",
    batch=32,
)
TRANSCRIPTS = 9_600
CARELESS = 0.7
MAX_QUESTIONS = 3


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    files = [Path(module.__file__) for module in (clinic, learning_to_ask, prepare_data)]
    return starting_model(RECIPE, transcripts, [Path(__file__), *files])


def transcripts() -> list[dict]:
    """Return the conversations."""
    rng = random.Random(RECIPE.seed)
    training, _ = prepare_data.tasks()
    return [transcript(task, rng) for task in rng.choices(training, k=TRANSCRIPTS)]


def transcript(task: dict, rng: random.Random) -> dict:
    """Return a conversation of a careless or of a careful desk."""
    messages = [
        {"role": "system", "content": learning_to_ask.SYSTEM_PROMPT},
        {"role": "user", "content": task["question"]},
    ]
    rule, stated = RULES[task["complaint"]], {topic: task["facts"][topic] for topic in task["stated"]}
    is_careless = rng.random() < CARELESS
    random_topics = rng.sample(list(TOPICS), rng.randint(0, MAX_QUESTIONS))
    asked = random_topics if is_careless else needed_topics(rule, task["facts"], stated)
    for topic in asked:
        messages.append({"role": "assistant", "content": TOPICS[topic].question})
        messages.append({"role": "user", "content": statement(topic, task["facts"][topic])})
    known = {**stated, **{topic: task["facts"][topic] for topic in asked}}
    possible = sorted(departments(rule, known))
    messages.append({"role": "assistant", "content": f"<department>{rng.choice(possible)}</department>"})
    return {"messages": messages}


if __name__ == "__main__":
    print(tiny_model())
