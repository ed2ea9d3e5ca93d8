"""The published results: the page and its pictures are those of the files, and the nightly check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from astuner.analysis.benchmark.report import picture_digest, published_page, write_page
from astuner.analysis.benchmark.results import bench_result, command_of, read_results, write_result
from astuner.analysis.benchmark.suite import SuiteEntry, load_suite
from astuner.config.loading import load_config
from tests.analysis.benchmark.results import fixed_result, seed_result

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def test_page_is_that_of_the_published_results():
    assert (DOCS / "en/results.md").read_text() == published_page(read_results(DOCS / "results")), "run `make results`"


def test_pictures_are_those_of_the_published_results():
    results = read_results(DOCS / "results")
    pictures = DOCS / "assets/results"
    expected = {f"{result.name}.png": picture_digest([result]) for result in results}
    expected["gains.png"] = picture_digest(results)
    assert {path.name for path in pictures.iterdir()} == expected.keys(), "run `make results`"
    for name, digest in expected.items():
        assert digest.encode() in (pictures / name).read_bytes(), f"{name} is out of date; run `make results`"


def test_published_files_are_named_by_their_result_and_are_of_entries_of_the_suite():
    suite = (ROOT / "tutorial/benchmark.yaml").read_text()
    for path in (DOCS / "results").iterdir():
        (result,) = read_results(path)
        assert path.name == f"{result.name}.json"
        assert f"name: {result.suite}\n" in suite


def test_published_commands_and_seeds_are_those_of_the_suite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    suite = {entry.name: entry for entry in load_suite(Path("tutorial/benchmark.yaml")).entries}
    for result in read_results(DOCS / "results"):
        entry = suite[result.suite]
        assert result.command == command_of(entry, result.backbone)
        # As the page says.
        expected = entry.seeds if result.backbone == "local" else (1, 2, 3)
        assert tuple(seed.seed for seed in result.seeds) == expected


def test_the_date_of_a_result_is_shown_if_it_is_known(tmp_path: Path):
    (tmp_path / "en").mkdir()
    result = fixed_result(lambda seed: [0.5, 0.6, 0.7], (1, 2))
    file = write_result(tmp_path / "results", result)
    assert '"date"' not in file.read_text()
    write_page(tmp_path)
    assert "Date:" not in (tmp_path / "en/results.md").read_text()
    dated = result.model_copy(update={"date": "2026-11-24"})
    assert read_results(write_result(tmp_path / "results", dated)) == [dated]
    write_page(tmp_path)
    assert "Starting model: `a/model`. Date: 2026-11-24.\n" in (tmp_path / "en/results.md").read_text()


def test_page_and_pictures_follow_the_files(tmp_path: Path):
    (tmp_path / "en").mkdir()
    rates = {1: [0.25, 0.5, 0.75], 2: [0.35, 0.5, 0.95]}
    write_result(tmp_path / "results", fixed_result(rates.__getitem__, (1, 2)))
    write_result(tmp_path / "results", fixed_result(lambda seed: [0.5, 0.6], (4,), backbone="verl"))
    write_page(tmp_path)
    page = (tmp_path / "en/results.md").read_text()
    assert "| [task](#task-on-local) | local | 2 | 30.0% | 85.0% | +55.0 | 50.0 to 60.0 | 0.00 M | 100 s |" in page
    assert "| [task](#task-on-verl) | verl | 1 | 50.0% | 60.0% | +10.0 | – | 0.00 M | 100 s |" in page
    assert "| 2 | 35.0% | 95.0% | +60.0 | 100 s |" in page
    pictures = tmp_path / "assets/results"
    before = {path.name: path.read_bytes() for path in pictures.iterdir()}
    assert before.keys() == {"task-local.png", "task-verl.png", "gains.png"}
    rates[2] = [0.35, 0.5, 0.9]
    write_result(tmp_path / "results", fixed_result(rates.__getitem__, (1, 2)))
    write_page(tmp_path)
    assert (tmp_path / "en/results.md").read_text() != page
    changed = {path.name for path in pictures.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"task-local.png", "gains.png"}


def test_the_sources_of_a_mixture_have_gains_of_their_own(tmp_path: Path):
    (tmp_path / "en").mkdir()
    ends = {1: {"sums": (0.0, 0.75), "legs": (0.25, 0.25)}, 2: {"sums": (0.0, 0.25), "legs": (0.25, 0.75)}}
    seeds = [seed_result(seed, [0.125, 0.5]).model_copy(update={"sources": ends[seed]}) for seed in ends]
    result = bench_result(SuiteEntry(name="task", conf="task.yaml"), "local", "a/model", {}, seeds)
    assert result.sources["sums"].model_dump() == {"before": 0.0, "after": 0.5, "mean_gain": 0.5, "ci95": (0.25, 0.75)}
    assert read_results(write_result(tmp_path / "results", result)) == [result]
    write_page(tmp_path)
    page = (tmp_path / "en/results.md").read_text()
    assert (
        "| tasks | before | after | gain | 95% interval |\n| --- | --- | --- | --- | --- |\n| sums | 0.0% | 50.0% |"
        in page
    )
    assert "| legs | 25.0% | 50.0% | +25.0 | 0.0 to 50.0 |" in page


@pytest.mark.parametrize(("after", "code"), [(0.8, 0), (0.76, 0), (0.72, 1)])
def test_nightly_check_fails_if_the_lower_end_drops(tmp_path: Path, after: float, code: int):
    # The seeds 4 and 5 are not in the new result.
    published = fixed_result(lambda seed: [0.5, 0.8 + seed / 1000 if seed < 4 else 0.5, 0.9], (1, 2, 3, 4, 5))
    new = fixed_result(lambda seed: [0.5, after + seed / 1000], (1, 2, 3))
    files = [write_result(tmp_path / name, result) for name, result in (("published", published), ("new", new))]
    script = [sys.executable, str(ROOT / ".ci/check_nightly.py"), *map(str, files), "1"]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert json.loads(ended.stdout)["published_gain"] == pytest.approx(0.302)
    assert ("at least" in ended.stderr) == bool(code)


def test_the_nightly_script_compares_steps_that_the_published_results_have():
    script = (ROOT / ".ci/nightly").read_text()
    found = re.search(r"^entries=\((.*)\)\nsteps=(\d+)$", script, re.MULTILINE)
    assert found
    suite = {entry.name: entry for entry in load_suite(ROOT / "tutorial/benchmark.yaml").entries}
    for entry in found[1].split():
        (published,) = read_results(DOCS / f"results/{entry}-local.json")
        assert published.of_seeds([1, 2, 3]).until(int(found[2])).ci95 is not None
        # The first steps of a shorter run are otherwise not those of a whole run.
        optim = load_config(ROOT / suite[entry].conf).config.astuner.trainer_common.optim
        assert (optim.lr_scheduler, optim.lr_warmup_steps) == ("constant", 0)
