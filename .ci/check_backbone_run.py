"""Check what three steps of the tiny math agent left on verl or trinity: `check_backbone_run.py BACKBONE RECORDS`."""

import importlib.util
import json
import math
import sys
from pathlib import Path

from astuner.run_record import read_metrics, read_summary

STEPS, EPISODES, MINI_BATCHES = 3, 16 * 8, 2
# In float32, between the engine that sampled and the trainer. On trinity, the weights that sampled are a step older.
MOST_DIFFERENCE = {"verl": 1e-4, "trinity": 0.05}
PACKAGE = {"verl": "verl", "trinity": "trinity-rft"}
# The rate is about 0.55. An agent whose tool fails has 0. The standard error of a rate of 200 episodes is 0.035.
LEAST_BEFORE, MOST_BEFORE = 0.4, 0.7

backbone = sys.argv[1]
record = Path(sys.argv[2]) / "math_agent_tiny"
summary = read_summary(record)
ran_with = json.loads((record / "environment.json").read_text())["packages"]
steps = [row for row in read_metrics(record) if "loss/policy" in row.metrics]
rates = [entry.success_rate if entry else None for entry in (summary.validation.before, summary.validation.after)]
version = ran_with.get(PACKAGE[backbone])
print(json.dumps({"steps": len(steps), "seconds": summary.seconds, "validation": rates, backbone: version}))
problems = [
    text
    for text, wrong in {
        f"it ran without {PACKAGE[backbone]}": version is None,
        f"this environment has {backbone}, so the run may have used it and not the backbone's own environment": (
            importlib.util.find_spec(backbone) is not None
        ),
        f"the backbone was {summary.backbone}": summary.backbone != backbone,
        f"there were {summary.steps} steps, with metrics of {len(steps)}; {STEPS} expected": (
            summary.steps != STEPS or [row.step for row in steps] != list(range(1, STEPS + 1))
        ),
        f"{summary.episodes} of {STEPS * EPISODES} episodes": summary.episodes.ok != STEPS * EPISODES,
        f"validations before and after: {rates}; the first should be {LEAST_BEFORE} to {MOST_BEFORE}": (
            None in rates or not LEAST_BEFORE < rates[0] < MOST_BEFORE
        ),
        "a loss or a gradient's norm is not finite": not all(
            math.isfinite(row.metrics[name]) for row in steps for name in ("loss/policy", "grad_norm")
        ),
        "the gradient is zero": not all(row.metrics["grad_norm"] > 0 for row in steps),
        f"engine and trainer differ by more than {MOST_DIFFERENCE[backbone]}": not all(
            row.metrics["logprob_difference"] < MOST_DIFFERENCE[backbone] for row in steps
        ),
        f"a step had other than {MINI_BATCHES} optimizer steps": not all(
            row.metrics["update/optimiser_steps"] == MINI_BATCHES for row in steps
        ),
        "there is no model": not (record / "model" / "model.safetensors").exists(),
        "there are no plots": not all((record / "plots" / name).exists() for name in ("reward.png", "loss.png")),
    }.items()
    if wrong
]
sys.exit("; ".join(problems) or 0)
