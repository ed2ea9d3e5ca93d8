"""Kill runs with SIGKILL at changes of their record and at random times, resume them, and compare the records.

Each round starts a run of the local backbone, kills it one to four times, and lets it end. Its record is compared with
that of an uninterrupted run: every row of the index, the metrics, TensorBoard and the episode files has to be there
once, with equal tokens, rewards, advantages and losses. Prints one line of JSON at the end, and exits with 1 if a row
was lost or doubled, or has another content.

    python -m campaigns.kill_campaign [--kills 100] [--seed 0] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from campaigns.serial_run import Comparison, Runs, compare, write_job


def create_model(folder: Path) -> Path:
    """Write the tiny model of the tests."""
    from tests.conftest import conversation, saved_model
    from tutorial.tiny_tokenizer import build_tokenizer

    rng = random.Random(0)
    tokenizer = build_tokenizer([conversation(rng) for _ in range(50)], context=512)
    return saved_model(tokenizer, folder / "model", hidden_size=32, head_dim=16)


class KillCampaign:
    """Rounds of killed and resumed runs, and the sums over them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.runs = Runs(write_job(folder, create_model(folder)))
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[dict[str, object]] = []
        self.changes = self.seconds = 0.0

    def measure(self) -> None:
        """Do the uninterrupted run, and count the changes of its record and its duration."""
        self.runs.complete(self.folder / "warm-up")

        def note(changes: int, seconds: float) -> bool:
            self.changes, self.seconds = changes, seconds
            return False

        self.runs.kill_when(self.folder / "whole", note)

    def round(self, number: int) -> None:
        """Kill a run one to four times, let it end, and compare its record."""
        folder = self.folder / f"round-{number}"
        for _ in range(self.rng.randint(1, 4)):
            self.counts[self._kill(folder)] += 1
        self.runs.complete(folder)
        self._add(number, compare(self.folder / "whole/run", folder / "run"))
        if not self.faults:
            shutil.rmtree(folder)

    def _kill(self, folder: Path) -> str:
        """Kill a run at a random moment; a third of the kills are in its last fifth, where it ends."""
        share = self.rng.uniform(0.8, 1.0) if self.rng.random() < 1 / 3 else self.rng.random()
        if self.rng.random() < 0.7:
            last = round(share * self.changes)
            return "by_change" if self.runs.kill_when(folder, lambda changes, _: changes >= last) else "ended_before"
        end = share * self.seconds
        return "by_time" if self.runs.kill_when(folder, lambda _, seconds: seconds >= end) else "ended_before"

    def _add(self, number: int, comparison: Comparison) -> None:
        self.counts["rounds"] += 1
        for name, value in asdict(comparison).items():
            self.counts[name] += value if isinstance(value, int) else len(value)
        if not comparison.is_equal:
            self.faults.append({"round": number, **asdict(comparison)})
            print(f"round {number}: {comparison}", file=sys.stderr)

    @property
    def kills(self) -> int:
        """Number of kills so far."""
        return self.counts["by_change"] + self.counts["by_time"]


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the records, which are removed without it")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        campaign = KillCampaign(folder, options.seed)
        campaign.measure()
        while campaign.kills < options.kills:
            campaign.round(campaign.counts["rounds"])
            print(f"{campaign.kills} kills: {dict(campaign.counts)}", file=sys.stderr, flush=True)
    report = {"kills": campaign.kills, **campaign.counts, "seconds": round(time.monotonic() - started, 1)}
    print(json.dumps(report))
    sys.exit(1 if campaign.faults else 0)


if __name__ == "__main__":
    main()
