"""Measure the speed of the viewer and print one line of JSON. Run it on an otherwise idle machine.

The times are those of requests to the application, without a network. With `--browser`, they include the time until a
page is drawn in a headless Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
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
SEARCHES = (
    "text=answer",
    "text=the+answer+is+77",
    "text=%22answer+is+4321%22",
    "text=bab*&where=answers",
    "text=answer&agent=agent-1&order=reward",
    "text=ababa",
)
OTHERS = ("runs", "run?run=episodes", "metrics?run=episodes", "groups?run=episodes&step=7", "config?run=episodes",
          "logs?run=episodes", "log?run=episodes&file=run.log", "log_search?run=episodes&file=run.log&text=zzz",
          "tracebacks?run=episodes", "answer?run=tokens&episode=long",
          "results?run=episodes", "solve_rates?run=episodes&split=train")  # fmt: skip
SEARCH = "/api/episodes?run=episodes&"
REPEATS = 20


def milliseconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the 95th percentile of the durations of calls of `function`; the median of fewer than 20 calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - start))
    return round(sorted(times)[int(0.95 * repeats)] if repeats >= 20 else statistics.median(times), 1)


def measure(folder: Path, browser: bool, episodes: int) -> dict[str, object]:
    many_episodes(folder / "episodes", episodes, texts=True)
    (folder / "episodes/run.log").write_text("".join(f"line {number} of the log\n" for number in range(1_000_000)))
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
        result["api_ms"] = {
            path: milliseconds(lambda p=path: http.get(f"/api/{p}").raise_for_status()) for path in OTHERS
        }
        start, during = time.perf_counter(), []
        page = {"done": False}
        while not page["done"]:
            during.append(milliseconds(lambda: page.update(http.get(SEARCH + SEARCHES[0]).json()["search"]), 1))
            time.sleep(0.2)
        result["text_index_s"] = round(time.perf_counter() - start, 1)
        result["text_index_mb"] = round(sum(file.stat().st_size for file in (folder / "cache").glob("*.text*")) / 1e6)
        result["search_while_indexing_ms"] = round(sorted(during)[int(0.95 * len(during))], 1)
        result["search_ms"] = {text: milliseconds(lambda t=text: http.get(SEARCH + t)) for text in SEARCHES}
        with (folder / "episodes/episodes/index.jsonl").open("a") as index:
            index.write(json.dumps(index_row(episodes)) + "\n")
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
            "page_of_runs_ms": milliseconds(draw("runs", ".list td"), 3),
            "page_of_run_ms": milliseconds(draw("run?run=episodes", ".tile b"), 3),
            "page_of_search_ms": milliseconds(draw("episodes?run=episodes&text=answer", ".excerpt mark"), 3),
            "page_of_list_ms": milliseconds(draw("episodes?run=episodes", ".list td"), 3),
            "page_of_episode_ms": milliseconds(draw(f"episode?run=tokens&episode={key}", ".tokens .t"), 3),
            "scroll_frame_p95_ms": round(driver.execute_async_script(frames), 1),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--episodes", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.browser, arguments.episodes)
    print(json.dumps({"benchmark": "view", "episodes": arguments.episodes, "load": os.getloadavg()[0], **result}))
