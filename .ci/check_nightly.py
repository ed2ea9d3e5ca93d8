"""Check that the gain has not dropped: `check_nightly.py PUBLISHED NEW STEP`, two result files of `astuner bench`.

The published result is reduced to the seeds of the new one, and to its first steps, up to STEP.
"""

import json
import sys
from pathlib import Path

from astuner.analysis.benchmark.results import read_results
from astuner.errors import RecordError

# Equal seeds sample equal tasks and episodes, so that runs of equal versions differ by rounding only: a token that is
# sampled otherwise changes the rest of its episode.
MARGIN = 0.05


def main(published: str, new: str, step: str) -> None:
    """Print both intervals as a line of JSON; exit with a message if the new lower end is below the published one."""
    try:
        whole, made = (read_results(Path(path))[0] for path in (published, new))
        seeds = [seed.seed for seed in made.seeds]
        results = [result.of_seeds(seeds).until(int(step)) for result in (whole, made)]
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
