"""Check what three steps of the tiny math agent left on the verl backbone: `check_verl_run.py RECORDS`."""

import importlib.util
import json
import math
import sys
from pathlib import Path

from astuner.run_record import read_metrics, read_summary

STEPS, EPISODES, MINI_BATCHES = 3, 16 * 8, 2
# In float32, between the engine that sampled and the trainer.
MOST_DIFFERENCE = 1e-4

record = Path(sys.argv[1]) / "math_agent_tiny"
summary = read_summary(record)
ran_with = json.loads((record / "environment.json").read_text())["packages"]
steps = [row for row in read_metrics(record) if "loss/policy" in row.metrics]
rates = [entry.success_rate if entry else None for entry in (summary.validation.before, summary.validation.after)]
print(json.dumps({"steps": len(steps), "seconds": summary.seconds, "validation": rates, "verl": ran_with.get("verl")}))
problems = [
    text
    for text, wrong in {
        "it ran without verl": "verl" not in ran_with,
        "this environment has verl, so the command did not re-execute in another": (
            importlib.util.find_spec("verl") is not None
        ),
        f"the backbone was {summary.backbone}": summary.backbone != "verl",
        f"there were {summary.steps} steps, with metrics of {len(steps)}; {STEPS} expected": (
            summary.steps != STEPS or [row.step for row in steps] != list(range(1, STEPS + 1))
        ),
        f"{summary.episodes} of {STEPS * EPISODES} episodes": summary.episodes.ok != STEPS * EPISODES,
        f"validations before and after: {rates}": None in rates,
        "a loss or a gradient's norm is not finite": not all(
            math.isfinite(row.metrics[name]) for row in steps for name in ("loss/policy", "grad_norm")
        ),
        "the gradient is zero": not all(row.metrics["grad_norm"] > 0 for row in steps),
        f"engine and trainer differ by more than {MOST_DIFFERENCE}": not all(
            row.metrics["logprob_difference"] < MOST_DIFFERENCE for row in steps
        ),
        f"a step had other than {MINI_BATCHES} optimizer steps": not all(
            row.metrics["update/optimiser_steps"] == MINI_BATCHES for row in steps
        ),
        "there is no model": not (record / "model" / "model.safetensors").exists(),
    }.items()
    if wrong
]
sys.exit("; ".join(problems) or 0)
