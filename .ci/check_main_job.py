"""Check that the main job did what the README promises: `check_main_job.py RECORDS`."""

import json
import sys
from pathlib import Path

# The rates are about 0.55 and 0.97. The standard error of a rate of 200 sampled episodes is 0.035 and 0.012.
MOST_BEFORE, LEAST_AFTER, NOISE = 0.65, 0.93, 0.06

records = Path(sys.argv[1])
run = json.loads((records / "math_agent_tiny" / "summary.json").read_text())
again = json.loads((records / "math_agent_tiny-eval" / "summary.json").read_text())
before = run["validation"]["before"]["success_rate"]
after = run["validation"]["after"]["success_rate"]
evaluated = again["validation"]["after"]["success_rate"]
print(json.dumps({"before": before, "after": after, "evaluated": evaluated, "seconds": run["seconds"]}))
problems = [
    text
    for text, wrong in {
        f"success before is {before}, at most {MOST_BEFORE} expected": before > MOST_BEFORE,
        f"success after is {after}, at least {LEAST_AFTER} expected": after < LEAST_AFTER,
        f"astuner eval gives {evaluated}, {after} expected": abs(evaluated - after) > NOISE,
    }.items()
    if wrong
]
sys.exit("; ".join(problems) or 0)
