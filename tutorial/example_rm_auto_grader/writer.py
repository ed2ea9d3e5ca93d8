"""The agent of the example, which answers questions about sums, and its tasks."""

import json
from pathlib import Path

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

DATA = Path(__file__).parent / "data"
HELD_OUT = 5
"""One of this number of questions is for validation."""
STYLES = (
    "{total}, because {a} plus {b} is {total}.",
    "{total}.",
    "Thank you for asking! {total}.",
    "{wrong}, because {a} plus {b} is {wrong}.",
)
"""Forms of answers; the first is the reference."""


class Writer(Workflow):
    """Asks the model once."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"final_answer": answer.parsed.content})


def questions() -> list[tuple[int, int]]:
    """Return the two numbers of each question."""
    return [(a, b) for a in range(1, 10) for b in range(1, 10)]


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def answer(style: int, a: int, b: int) -> str:
    return STYLES[style].format(a=a, b=b, total=a + b, wrong=a + b + 1)


def training_file() -> Path:
    return _write("training.jsonl", [_task(a, b) for i, (a, b) in enumerate(questions()) if i % HELD_OUT])


def validation_file() -> Path:
    return _write("validation.jsonl", [_task(a, b) for i, (a, b) in enumerate(questions()) if not i % HELD_OUT])


def references() -> list[dict]:
    """Return the samples that the rubrics are learned from: the reference, and an answer with its score."""
    return [
        {**_task(a, b), "final_answer": answer(1 + i % (len(STYLES) - 1), a, b), "score": 0.0}
        for i, (a, b) in enumerate(questions()[::4])
    ]


def _task(a: int, b: int) -> dict:
    return {"main_query": question(a, b), "answer": answer(0, a, b)}


def _write(name: str, rows: list[dict]) -> Path:
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
