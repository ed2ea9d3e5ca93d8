"""How fast the viewer is: one line of JSON. Run it alone on the machine.

The times are those of a request to the application, without a network; with `--browser`, also those until a page is
drawn in a headless Chromium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from astuner.viewer.index import key_of
from tests.viewer.browser import Page, chromium
from tests.viewer.conftest import client, served
from tests.viewer.long_runs import index_row, many_episodes, many_tokens

FILTERS = (
    "",
    "&agent=agent-1",
    "&fork=truncated&least=0.5",
    "&text=e-0123",
    "&order=reward&offset=90000",
    "&error=any",
)
REPEATS = 7


def milliseconds(act: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of an act."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        taken.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(taken), 1)


def measure(folder: Path, browser: bool) -> dict[str, object]:
    many_episodes(folder / "episodes", 100_000)
    key = key_of(many_tokens(folder / "tokens", 100_000, 500))
    (folder / "cache").mkdir()
    with client(folder, folder / "cache") as asked:
        found: dict[str, object] = {
            "first_index_ms": milliseconds(lambda: asked.get("/api/episodes?run=episodes"), 1),
            "list_ms": {
                f or "all": milliseconds(lambda f=f: asked.get(f"/api/episodes?run=episodes{f}")) for f in FILTERS
            },
            "run_ms": milliseconds(lambda: asked.get("/api/run?run=episodes")),
            "episode_ms": milliseconds(lambda: asked.get(f"/api/episode?run=tokens&episode={key}")),
        }
        with (folder / "episodes/episodes/index.jsonl").open("a") as index:
            index.write(json.dumps(index_row(100_000)) + "\n")
        found["one_new_line_ms"] = milliseconds(lambda: asked.get("/api/episodes?run=episodes"), 1)
    if browser:
        found |= in_browser(folder, key)
    return found


def in_browser(folder: Path, key: str) -> dict[str, object]:
    with served(folder, folder / "cache") as address, chromium() as driver:
        page = Page(driver, address)

        def drawn(place: str, selector: str) -> Callable[[], object]:
            return lambda: (page.open(place), page.one(selector))

        frames = """
            const done = arguments[0], box = document.querySelector('.tokens'), times = [];
            let last = performance.now();
            const frame = (now) => {
              times.push(now - last); last = now; box.scrollTop += 400;
              if (times.length < 120) requestAnimationFrame(frame);
              else done(times.slice(1).sort((a, b) => a - b)[Math.floor(0.95 * 119)]);
            };
            requestAnimationFrame(frame);
        """
        return {
            "page_of_list_ms": milliseconds(drawn("episodes?run=episodes", ".list td"), 3),
            "page_of_episode_ms": milliseconds(drawn(f"episode?run=tokens&episode={key}", ".tokens .t"), 3),
            "scroll_frame_p95_ms": round(driver.execute_async_script(frames), 1),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", action="store_true")
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps({"benchmark": "view", **measure(Path(place), parser.parse_args().browser)}))
