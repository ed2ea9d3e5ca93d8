"""Measure the speed of the viewer and print one line of JSON. Run it on an otherwise idle machine.

The times are those of requests to the application, without a network. With `--browser`, they include the time until a
page is drawn in a headless Chromium.
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


def milliseconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median duration of calls of `function`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times), 1)


def measure(folder: Path, browser: bool) -> dict[str, object]:
    many_episodes(folder / "episodes", 100_000)
    key = key_of(many_tokens(folder / "tokens", 100_000, 500))
    (folder / "cache").mkdir()
    with client(folder, folder / "cache") as http:
        result: dict[str, object] = {
            "first_index_ms": milliseconds(lambda: http.get("/api/episodes?run=episodes"), 1),
            "list_ms": {
                f or "all": milliseconds(lambda f=f: http.get(f"/api/episodes?run=episodes{f}")) for f in FILTERS
            },
            "run_ms": milliseconds(lambda: http.get("/api/run?run=episodes")),
            "episode_ms": milliseconds(lambda: http.get(f"/api/episode?run=tokens&episode={key}")),
        }
        with (folder / "episodes/episodes/index.jsonl").open("a") as index:
            index.write(json.dumps(index_row(100_000)) + "\n")
        result["one_new_line_ms"] = milliseconds(lambda: http.get("/api/episodes?run=episodes"), 1)
    if browser:
        result |= in_browser(folder, key)
    return result


def in_browser(folder: Path, key: str) -> dict[str, object]:
    with served(folder, folder / "cache") as address, chromium() as driver:
        page = Page(driver, address)

        def draw(path: str, selector: str) -> Callable[[], object]:
            return lambda: (page.open(path), page.element(selector))

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
            "page_of_list_ms": milliseconds(draw("episodes?run=episodes", ".list td"), 3),
            "page_of_episode_ms": milliseconds(draw(f"episode?run=tokens&episode={key}", ".tokens .t"), 3),
            "scroll_frame_p95_ms": round(driver.execute_async_script(frames), 1),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"benchmark": "view", **measure(Path(folder), parser.parse_args().browser)}))
