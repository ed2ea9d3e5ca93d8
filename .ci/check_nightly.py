"""Check that the gain has not dropped: `check_nightly.py PUBLISHED NEW STEP`, two result files of `astuner bench`.

The published result is reduced to its first steps, up to STEP.
"""

import json
import sys
from pathlib import Path

from astuner.benchmark import read_results
from astuner.errors import RecordError

# The lower end of the interval of three seeds is about the lowest of them, so that it varies more than a mean. With a
# standard deviation of 4.5 percentage points between the gains of seeds, an equal version drops below this margin in
# one night of a hundred.
MARGIN = 0.1


def main(published: str, new: str, step: str) -> None:
    """Print both intervals as a line of JSON; exit with a message if the new lower end is below the published one."""
    try:
        results = [read_results(Path(path))[0].until(int(step)) for path in (published, new)]
    except RecordError as error:
        sys.exit(str(error))
    lows = []
    for result in results:
        if result.ci95 is None:
            sys.exit(f"{result.suite} has no interval; it needs two seeds or more")
        lows.append(result.ci95[0])
    print(json.dumps({"published_gain": results[0].mean_gain, "published_low": lows[0], "gain": results[1].mean_gain,
                      "low": lows[1], "margin": MARGIN}))  # fmt: skip
    if lows[1] < lows[0] - MARGIN:
        sys.exit(
            f"the lower end of the interval of {results[1].suite} after {step} steps is {lows[1]:.3f}; at least "
            f"{lows[0] - MARGIN:.3f} expected ({lows[0]:.3f} published, less the margin of {MARGIN})"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
