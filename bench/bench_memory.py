"""Compare the memory that `astuner check` estimates with the peak resident memory of the run.

Four cases: the tiny math agent (`math_agent_tiny.yaml`) and SmolLM2-135M, each with all weights and with adapters
trained, on a CPU. Each is checked and then trained for a few steps, in its own processes. SmolLM2 is the
model of tutorial/example_real_model. It answers with stories, so every answer has the maximum length.

Prints one line of JSON: for each case the estimate and the measurement in MiB (2^20 bytes), and their ratio.

    pip install -e ".[smollm]"
    python bench/bench_memory.py [--cases tiny tiny_lora smollm2 smollm2_lora] [--steps 2]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
UNITS = {"MiB": 1.0, "GiB": 1024.0}
ADAPTERS = ("astuner.model.lora.rank=16",)
CASES = {"tiny": (), "tiny_lora": ADAPTERS, "smollm2": (), "smollm2_lora": ADAPTERS}


def smollm2_configuration(folder: Path) -> Path:
    """Write the tasks and the configuration of the SmolLM2 cases; return the YAML file."""
    rows = [{"question": f"Write a long story about the number {number}."} for number in range(10, 18)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": "tutorial.example_real_model.smollm2->smollm2"},
        "task_reader": {"type": "dataset_file", "dataset_file": {"training": {"file_path": "tasks.jsonl"}}},
        "data": {"train_batch_size": 4},
        "rollout": {
            "agentscope_workflow": f"{FOLDER / 'memory_agent.py'}->Storyteller",
            "num_repeat": 8,
            "temperature": 1.0,
            "max_response_length_in_one_turn": 64,
            "compute_madness_checklist": [],
        },
        "trainer_common": {"use_kl_loss": False, "max_tokens_per_micro_batch": 1024},
    }
    path = folder / "smollm2.yaml"
    path.write_text(json.dumps({"astuner": config}))  # JSON is YAML
    return path


def astuner(folder: Path, *words: str) -> tuple[str, float]:
    """Run an `astuner` command; return its output and its peak memory in MiB."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (folder / "output.txt").open("w+") as output:
        command = [sys.executable, "-m", "astuner", *words]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} exited with {process.returncode}:\n{text}")
    return text, usage.ru_maxrss / 1024


def measure(case: str, folder: Path, steps: int) -> dict[str, float]:
    """Estimate and measure the memory of a case."""
    if case.startswith("smollm2"):
        conf = smollm2_configuration(folder)
    else:
        conf = ROOT / "tutorial/example_math_agent/math_agent_tiny.yaml"
    words = ["--conf", str(conf), "--backbone=local", f"--exp-dir={folder / case}", *CASES[case]]
    words += ["astuner.trainer_common.device=cpu", f"astuner.trainer_common.total_training_steps={steps}"]
    text, _ = astuner(folder, "check", *words)
    found = re.search(r"^memory +about ([\d.,]+) (MiB|GiB) ", text, re.MULTILINE)
    assert found is not None, text
    estimate = float(found[1].replace(",", "")) * UNITS[found[2]]
    _, measured = astuner(folder, *words)
    return {
        "estimate_mib": round(estimate, 1),
        "measured_mib": round(measured, 1),
        "estimate_to_measured": round(estimate / measured, 3),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_memory_") as name:
        results = {case: measure(case, Path(name), arguments.steps) for case in arguments.cases}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
