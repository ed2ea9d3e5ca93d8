"""A flywheel: serve a model, collect its conversations with ratings, train on the good ones, serve the result, repeat.

Run: `python -m tutorial.example_flywheel.flywheel`. The users are simulated: each asks an arithmetic question and rates
the answer of the agent 1 if it is right and 0 if it is wrong.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, execute_python_code

from astuner import AstunerJob
from tutorial.example_math_agent.math_agent import system_prompt
from tutorial.example_math_agent.prepare_data import make_task

TRACE_HEADER = "x-trace-id"
CONCURRENT_USERS = 8


@contextmanager
def served(model: Path, traces: Path) -> Iterator[str]:
    """Serve a model with `astuner serve` during the block; yield the address for clients."""
    command = [sys.executable, "-m", "astuner", "serve", "--model", str(model), "--traces", str(traces)]
    command += ["--renderer", "qwen3", "--max-tokens", "48"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if address := re.search(r" at (http://\S+)", line):
                yield address[1]
                break
        else:
            raise RuntimeError(f"the server has ended with code {process.wait()}")
    finally:
        process.terminate()
        process.communicate()


async def ask_agent(address: str, question: str, trace_id: str) -> str:
    """Let the deployed agent answer a question. It knows nothing of astuner: it is a client of OpenAI's API."""
    toolkit = Toolkit()
    toolkit.register_tool_function(execute_python_code)
    connection = {"base_url": address, "default_headers": {TRACE_HEADER: trace_id}}
    model = OpenAIChatModel("astuner", api_key="none", stream=False, client_kwargs=connection)
    agent = ReActAgent(
        name="math_react_agent",
        sys_prompt=system_prompt,
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=InMemoryMemory(),
        max_iters=2,
    )
    agent.set_console_output_enabled(False)
    async with model.client:
        return (await agent(Msg("user", question, "user"))).get_text_content() or ""


async def deploy(address: str, tasks: list[dict[str, str]], prefix: str) -> float:
    """Let users ask the questions and rate the answers; return the share of right answers."""
    slots = asyncio.Semaphore(CONCURRENT_USERS)

    async def user(number: int, task: dict[str, str]) -> bool:
        trace_id = f"{prefix}-{number:04d}"
        async with slots:
            answer = await ask_agent(address, task["question"], trace_id)
            is_right = f"\\boxed{{{task['answer']}}}" in answer
            feedback = {"trace_id": trace_id, "rating": int(is_right)}
            (await client.post(f"{address}/feedback", json=feedback)).raise_for_status()
        return is_right

    async with httpx.AsyncClient(timeout=60) as client:
        right = await asyncio.gather(*(user(number, task) for number, task in enumerate(tasks)))
    return sum(right) / len(right)


def train(model: Path, traces: Path, folder: Path, settings: dict) -> Path:
    """Train a model on the conversations that were rated 1, and return the folder of the new model."""
    job = AstunerJob(
        algorithm="sft",
        model=model,
        backbone="local",
        project_name="flywheel",
        experiment_name=folder.name,
        model__renderer="qwen3",
        data__train_batch_size=16,
        trainer_common__optim__lr=3e-4,
        trainer_common__total_epochs=2,
        trainer_common__use_kl_loss=False,
        trainer_common__save_freq=1000,
        task_reader__type="feedback_tracing",
        task_reader__feedback_tracing__base_url=str(traces),
        task_reader__feedback_tracing__min_rating=1,
        task_reader__feedback_tracing__train_output_path=str(folder / "training.jsonl"),
        task_reader__feedback_tracing__validation_output_path=str(folder / "validation.jsonl"),
    )
    return job.configure(settings).tune(exp_dir=folder.parent / "runs").path


def turn_flywheel(
    model: Path, folder: Path, *, turns: int, users: int, test_users: int, settings: dict | None = None
) -> list[float]:
    """Return the success of the served model on new questions before the first turn and after each turn.

    Args:
        model: the folder of the model to start with.
        folder: the folder for traces, training data and runs.
        turns: the number of turns.
        users: the number of users in each turn, whose conversations are trained on.
        test_users: the number of users whose conversations are only counted.
        settings: further keys of astuner for the training.
    """
    rng = random.Random(3)
    test_tasks = [make_task(rng) for _ in range(test_users)]
    test_questions = {task["question"] for task in test_tasks}
    # The questions of the test are not trained on.
    user_tasks = (task for task in iter(lambda: make_task(rng), None) if task["question"] not in test_questions)
    success = []
    for turn in range(1, turns + 2):
        place = folder / f"turn_{turn}"
        place.mkdir(parents=True, exist_ok=True)
        traces = place / "traces.jsonl"
        with served(model, place / "test_traces.jsonl") as address:
            success.append(asyncio.run(deploy(address, test_tasks, "test")))
        print(json.dumps({"turn": turn - 1, "success": success[-1], "questions": test_users}), flush=True)
        if turn > turns:
            break
        with served(model, traces) as address:
            rated = asyncio.run(deploy(address, list(islice(user_tasks, users)), f"turn-{turn}"))
        print(json.dumps({"turn": turn, "collected": users, "rated_1": rated}), flush=True)
        model = train(model, traces, place, settings or {})
    return success


if __name__ == "__main__":
    from tutorial.example_math_agent.prepare_model import tiny_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--users", type=int, default=300)
    parser.add_argument("--test-users", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("launcher_record/flywheel"))
    options = parser.parse_args()
    turn_flywheel(tiny_model(), options.folder, turns=options.turns, users=options.users, test_users=options.test_users)
