"""Create the starting model of math_agent_tiny.yaml, which has about 1 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded transcripts. Half of the
transcripts use the Python tool and half guess, so the model starts out using the tool about half of the time and
reinforcement learning can improve on that.

The folder `starting_model` is the result, so that a first run starts at once. If you change this recipe, the model is
created again, in some minutes, and cached in the user's cache folder. This command puts it into `starting_model`:

    python -m tutorial.example_math_agent.prepare_model
"""

import json
import random
from pathlib import Path

from tutorial.example_math_agent import prepare_data
from tutorial.example_math_agent.math_agent import system_prompt
from tutorial.example_math_agent.prepare_data import make_splits, make_task
from tutorial.starting_model import Recipe, ship, starting_model

RECIPE = Recipe("math_agent_tiny")
TRANSCRIPTS = 25_600
SHIPPED = Path(__file__).parent / "starting_model"
SOURCES = (Path(__file__), Path(prepare_data.__file__), system_prompt)


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if the shipped one was made with another recipe."""
    return starting_model(RECIPE, transcripts, SOURCES, shipped=SHIPPED)


def transcripts() -> list[dict]:
    """Return the transcripts. Their questions are in none of the splits."""
    rng = random.Random(RECIPE.seed)
    training, validation = make_splits()
    avoid = {task["question"] for task in (*training, *validation)}
    tools = _tools()
    return [transcript(rng, avoid, tools) for _ in range(TRANSCRIPTS)]


def transcript(rng: random.Random, avoid: set[str], tools: list[dict]) -> dict:
    """Return a conversation in the form of the agent's. Questions in `avoid` are not used."""
    task = make_task(rng)
    while task["question"] in avoid:
        task = make_task(rng)
    question, answer = task["question"], task["answer"]
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
    final: dict[str, str] = {"role": "assistant"}
    if rng.random() < 0.5:
        expression = question.removeprefix("What is ").removesuffix("?")
        call = {"name": "execute_python_code", "arguments": json.dumps({"code": f"print({expression})"})}
        output = f"<returncode>0</returncode><stdout>{answer}\n</stdout><stderr></stderr>"
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "content": output, "tool_call_id": "1", "name": "execute_python_code"},
        ]
    else:
        answer = str(int(answer) + rng.choice([1, -1, 10, -10, 100, -100]))
        # The thinking makes the first token, which decides against the tool, one that supervised training trains.
        final["reasoning_content"] = "I can do this in my head."
    final["content"] = f"\\boxed{{{answer}}}"
    messages.append(final)
    return {"messages": messages, "tools": tools}


def _tools() -> list[dict]:
    from agentscope.tool import Toolkit, execute_python_code

    toolkit = Toolkit()
    toolkit.register_tool_function(execute_python_code)
    return toolkit.get_json_schemas()


if __name__ == "__main__":
    if (made := tiny_model()) != SHIPPED:
        ship(made, SHIPPED, RECIPE, SOURCES)
    print(SHIPPED)
