"""Measure how many silent faults the product names: `python bench/faults`.

Forty faults are injected into short runs of the local backbone, some in several forms. A fault is named if a message of
the product, in the record or as the error that ends the run, says what is wrong and what to change, for each form.
Clean runs measure false alarms. The last line is one JSON object. The exit code is 1 if a fault is missed, or after a
false alarm.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[0] = str(Path(__file__).parents[2])

from astuner.diagnostics.monitor import all_checks  # noqa: E402
from bench.faults.cases import FAULTS  # noqa: E402
from bench.faults.clean import clean_runs  # noqa: E402
from bench.faults.runs import run_all  # noqa: E402
from tutorial.example_math_agent.prepare_model import tiny_model  # noqa: E402

CLEAN_STEPS = 1000


def main() -> None:
    """Run the faults and the clean runs, and print what was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of faults; no clean runs")
    parser.add_argument("--clean-steps", type=int, default=CLEAN_STEPS, help="number of clean steps")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of a run")
    options = parser.parse_args()
    tiny_model()  # made once, before the runs
    import peft  # noqa: F401  imported here once for all forked runs
    import renderers  # noqa: F401
    import torch  # noqa: F401
    import transformers

    transformers.utils.logging.set_verbosity_error()
    chosen = [fault for fault in FAULTS if options.only is None or fault.name in options.only]
    fault_of = {name: fault for fault in chosen for name in fault.runs}
    steps: dict[str, float] = dict.fromkeys((fault.name for fault in chosen), 0)
    found = set()
    for name, report in run_all({n: f.runs[n] for n, f in fault_of.items()}, options.parallel, options.seconds):
        fault = fault_of[name]
        step = fault.named_in(report)
        steps[fault.name] = max(steps[fault.name], math.inf if step is None else step)
        found |= {check for _, check, _ in report.findings}
        checks = sorted({f"{check}@{at}" for at, check, _ in report.findings})
        print(f"{name}: {'missed' if step is None else f'named in step {step}'} {' '.join(checks)}", flush=True)
        if options.only is not None:
            print("\n".join(f"  {at} {check}: {text}" for at, check, text in report.findings))
        if (step is None or options.only is not None) and report.error:
            print(f"  error: {report.error[-1500:]}")
    clean_steps = false_alarms = 0
    if options.only is None:
        print(
            "checks that found no fault:",
            ", ".join(check.name for check in all_checks() if check.name not in found) or "none",
        )
        for name, report in run_all(clean_runs(options.clean_steps), options.parallel, 10 * options.seconds):
            clean_steps += report.steps
            false_alarms += len(report.findings)
            print(f"clean {name}: {report.steps} steps, {len(report.findings)} false alarms {report.error}", flush=True)
            for at, check, text in report.findings:
                print(f"  {at} {check}: {text}")
    within = sum(steps[fault.name] <= fault.from_step for fault in chosen)
    missed = [name for name, step in steps.items() if step == math.inf]
    result = {
        "faults": len(chosen),
        "named_within_a_step": within,
        "named_later": len(chosen) - within - len(missed),
        "missed": missed,
        "clean_steps": clean_steps,
        "false_alarms": false_alarms,
    }
    print(json.dumps(result))
    if missed or false_alarms:
        sys.exit(1)


if __name__ == "__main__":
    main()
