"""Check that the gain has not dropped: `check_nightly.py PUBLISHED NEW`, two result files of `astuner bench`."""

import json
import sys
from pathlib import Path

# The lower end of the interval of three seeds is about the lowest of them, so that it varies more than a mean.
MARGIN = 0.05

published, new = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
lows = []
for result in (published, new):
    if result["ci95"] is None:
        sys.exit(f"{result['suite']} has no interval; it needs two seeds or more")
    lows.append(result["ci95"][0])
print(json.dumps({"published_gain": published["mean_gain"], "published_low": lows[0], "gain": new["mean_gain"],
                  "low": lows[1], "margin": MARGIN}))  # fmt: skip
if lows[1] < lows[0] - MARGIN:
    sys.exit(
        f"the lower end of the interval of {new['suite']} is {lows[1]:.3f}; at least {lows[0] - MARGIN:.3f} expected "
        f"({lows[0]:.3f} published, less the margin of {MARGIN})"
    )
