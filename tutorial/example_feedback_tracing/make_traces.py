"""Write the log of a deployed math agent, with the feedback of simulated users, for feedback_tracing.yaml.

The agent answers arithmetic questions and is often wrong. A user rates an answer 1 or 0, corrects some of the wrong
ones, and sometimes says nothing. `python -m tutorial.example_feedback_tracing.make_traces` writes the file by hand.
"""

import json
import os
import random
from pathlib import Path

from tutorial.example_math_agent.math_agent import system_prompt
from tutorial.example_math_agent.prepare_data import make_task

SEED = 11
CHATS = 800
FILE = Path(__file__).parent / "data" / "traces.jsonl"


def make_chat(rng: random.Random, number: int) -> dict:
    """Return one line of the log: a chat in OpenAI's format with feedback."""
    task = make_task(rng)
    is_correct = rng.random() < 0.5
    answer = task["answer"] if is_correct else str(int(task["answer"]) + rng.choice([1, -1, 10, -10]))
    chat = {
        "trace_id": f"chat-{number:04d}",
        "messages": [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
        ],
    }
    if rng.random() < 0.8:  # the other users give no feedback
        chat["rating"] = int(is_correct)
        if not is_correct and rng.random() < 0.7:
            chat["edit"] = f"\\boxed{{{task['answer']}}}"
    return chat


def trace_file() -> Path:
    """Write the log and return the path of the file."""
    rng = random.Random(SEED)
    FILE.parent.mkdir(exist_ok=True)
    unfinished = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    unfinished.write_text("".join(json.dumps(make_chat(rng, number)) + "\n" for number in range(CHATS)))
    return unfinished.replace(FILE)  # atomic, because another run may be reading the file


def without_names(text: str) -> str:
    """Remove personal data from a text: here the name of a user. Use a library of your choice for real data."""
    return text.replace("Ada Lovelace", "[name]")


if __name__ == "__main__":
    print(trace_file())
