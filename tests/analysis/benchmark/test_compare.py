"""`astuner bench compare`: false alarms on equal versions, and the regressions that it reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from astuner.analysis.benchmark.comparison import compare_results
from astuner.analysis.benchmark.report import draw_curves, results_page
from astuner.analysis.benchmark.results import BenchResult, SeedResult, read_results, write_result
from astuner.cli.main import astuner as command
from astuner.errors import RecordError
from tests.analysis.benchmark.results import STEPS, fixed_result, learning_curve, simulated_result

BASE = learning_curve(0.1)


def verdicts(a: Sequence[BenchResult], b: Sequence[BenchResult], level: float = 0.01) -> dict[tuple[str, str], str]:
    return {(row.name, row.measure): row.verdict for row in compare_results(a, b, level).rows}


THREE, FIVE = (1, 2, 3), ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10))


@pytest.mark.parametrize(
    ("pairs", "seeds_a", "seeds_b", "expected"),
    [
        (30, THREE, THREE, {0.01: 0, 0.05: 1}),
        (30, *FIVE, {0.01: 1, 0.05: 2}),
        pytest.param(300, THREE, THREE, {0.01: 0, 0.05: 4}, marks=pytest.mark.long),
        pytest.param(300, *FIVE, {0.01: 2, 0.05: 9}, marks=pytest.mark.long),
    ],
)
def test_false_alarms_on_equal_versions_are_as_rare_as_the_level_says(
    pairs: int, seeds_a: Sequence[int], seeds_b: Sequence[int], expected: dict[float, int]
):
    """The page on benchmarks states the counts of 300 pairs. NumPy's generator of random numbers determines them."""
    generator = np.random.default_rng(7)
    alarms: Counter[float] = Counter()
    for _ in range(pairs):
        # Two entries: four tests, for which Holm's correction accounts.
        sides = [
            [simulated_result(generator, BASE, seeds, name=name) for name in ("one", "two")]
            for seeds in (seeds_a, seeds_b)
        ]
        for level in expected:
            alarms[level] += "worse" in verdicts(*sides, level=level).values()
    assert alarms == expected


def test_ten_pairs_of_equal_versions_raise_no_alarm():
    generator = np.random.default_rng(3)
    for _ in range(10):
        a, b = ([simulated_result(generator, BASE, seeds)] for seeds in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)))
        assert "worse" not in verdicts(a, b).values()


def test_a_version_that_unlearns_is_caught_in_both_measures_with_three_seeds():
    generator = np.random.default_rng(5)
    unlearns = [0.3, 0.1, 0.02, 0.0, 0.0]
    for _ in range(50):
        a, b = (simulated_result(generator, curve, (1, 2, 3)) for curve in (BASE, unlearns))
        assert set(verdicts([a], [b]).values()) == {"worse"}
        assert set(verdicts([b], [a]).values()) == {"better"}


def test_half_the_learning_rate_shows_in_the_curve():
    generator = np.random.default_rng(5)
    caught: Counter[str] = Counter()
    for _ in range(50):
        a, b = (simulated_result(generator, learning_curve(rate), (1, 2, 3, 4, 5)) for rate in (0.15, 0.075))
        for (_, measure), verdict in verdicts([a], [b], level=0.05).items():
            caught[measure] += verdict == "worse"
    assert caught["mean of the curve"] >= 40
    assert caught["success after"] < caught["mean of the curve"]


def test_small_differences_are_tolerated_and_rates_of_one_are_no_evidence():
    def close(to: float) -> BenchResult:
        return fixed_result(lambda seed: [0.5, 0.7, 0.8, 0.9, to], range(1, 9))

    assert set(verdicts([close(1.0)], [close(0.995)]).values()) == {"equal"}
    # No variance over three seeds: 199 of 200 and 196 of 200 episodes are within the noise of the validation.
    a, b = (fixed_result(lambda seed, to=to: [0.5, 0.7, 0.8, 0.9, to], (1, 2, 3)) for to in (0.995, 0.98))
    assert verdicts([a], [b])["task-local", "success after"] == "equal"


def test_backbones_curves_and_entries_that_differ():
    local = fixed_result(lambda seed: [0.3, 0.5, 0.7, 0.8, 0.9], (1, 2, 3))
    verl = fixed_result(lambda seed: [0.3, 0.5, 0.7, 0.8, 0.9], (1, 2, 3), backbone="verl")
    other = fixed_result(lambda seed: [0.3, 0.8, 0.9], (1, 2, 3), name="other")
    short = fixed_result(lambda seed: [0.3, 0.8, 0.9], (1, 2, 3))
    assert {name for name, _ in verdicts([local], [verl])} == {"task, local and verl"}
    comparison = compare_results([local], [short, other])
    assert [row.measure for row in comparison.rows] == ["success after"]
    assert (comparison.missing, comparison.is_regression) == ((), False)
    assert comparison.notes == (
        "other-local: only in B",
        "task-local: the mean of the curve is not compared, because the validations are at different steps",
    )
    with pytest.raises(RecordError, match="nothing to compare:\n  B has no result of task-local\n  other-local: only"):
        compare_results([local], [other])


def test_curves_that_cannot_be_compared_are_named():
    curves = fixed_result(lambda seed: [0.3, 0.5, 0.7, 0.8, 0.9], (1, 2, 3))
    ends = fixed_result(lambda seed: [0.3, 0.9], (1, 2, 3))
    mixed = fixed_result(lambda seed: [0.3, 0.5, 0.7, 0.8, 0.9] if seed < 3 else [0.3, 0.8, 0.9], (1, 2, 3))
    start = "task-local: the mean of the curve is not compared, because"
    for a, b, notes in (
        (ends, ends, ()),
        (curves, ends, (f"{start} B has no validation during training",)),
        (ends, curves, (f"{start} A has no validation during training",)),
        (mixed, mixed, (f"{start} the validations are at different steps",)),
    ):
        comparison = compare_results([a], [b])
        assert ([row.measure for row in comparison.rows], comparison.notes) == (["success after"], notes)


def test_what_b_lacks_is_a_regression():
    a, b = (fixed_result(lambda seed: [0.3, 0.9], (1, 2, 3), name=name) for name in ("one", "two"))
    comparison = compare_results([a, b], [b])
    assert (comparison.missing, comparison.is_regression) == (("B has no result of one-local",), True)
    assert not compare_results([b], [a, b]).is_regression
    failed = b.model_copy(update={"failed_seeds": (4, 5)})
    comparison = compare_results([b], [failed])
    assert (comparison.missing, comparison.is_regression) == (("seeds 4, 5 of B failed in two-local",), True)
    # The same seeds fail in A.
    comparison = compare_results([failed], [failed.model_copy(update={"failed_seeds": (4,)})])
    assert (comparison.missing, comparison.notes) == ((), ("two-local: seeds 4, 5 of A failed",))
    across = compare_results(
        [a, b], [result.model_copy(update={"backbone": "verl", "failed_seeds": (4,)}) for result in (b,)]
    )
    assert across.missing == ("B has no result of one", "seed 4 of B failed in two")


def test_common_seeds_are_compared_in_pairs():
    # Seeds differ by more than the versions do.
    a = fixed_result(lambda seed: [0.1, 0.2 + 0.1 * seed], (1, 2, 3, 4, 5))
    b = fixed_result(lambda seed: [0.1, 0.06 + 0.1 * seed], (2, 3, 4))
    (row,) = compare_results([a], [b], level=0.05).rows
    assert (row.difference.paired, row.verdict) == (False, "equal")
    (row,) = compare_results([a], [b], level=0.05, common_seeds=True).rows
    assert (row.difference.paired, row.a, row.verdict) == (True, pytest.approx(0.5), "worse")
    with pytest.raises(RecordError, match="task-local is not compared: A and B have no common seed"):
        compare_results([a.of_seeds([1, 5])], [b], common_seeds=True)


def test_the_first_steps_of_a_whole_result_are_compared_with_a_shorter_one():
    whole = fixed_result(lambda seed: [0.3, 0.5, 0.7, 0.8, 0.9], (1, 2, 3))
    same = fixed_result(lambda seed: [0.3, 0.5, 0.7], (1, 2, 3))
    same = same.model_copy(update={"seeds": tuple(_at(seed, STEPS[:3]) for seed in same.seeds)})
    first = whole.until(20)
    assert (first.mean_gain, first.ci95) == (pytest.approx(0.4), pytest.approx((0.4, 0.4)))
    assert first.seeds[0].curve == ((0, 0.3), (10, 0.5), (20, 0.7))
    comparison = compare_results([whole], [same], until=20)
    assert [(row.measure, row.a, row.b, row.verdict) for row in comparison.rows] == [
        ("success after", pytest.approx(0.7), pytest.approx(0.7), "equal"),
        ("mean of the curve", pytest.approx(0.5), pytest.approx(0.5), "equal"),
    ]
    assert comparison.notes == ()
    some = simulated_result(np.random.default_rng(2), BASE).of_seeds([2, 5])
    assert [seed.seed for seed in some.seeds] == [2, 5]
    assert some.mean_gain == pytest.approx(sum(seed.gain for seed in some.seeds) / 2)
    with pytest.raises(RecordError, match="task-local has no result of the seeds 6, 7"):
        some.of_seeds([2, 6, 7])
    with pytest.raises(RecordError, match="no validation after step 15 for seed 1; it has some at 0, 10, 20, 30, 40"):
        compare_results([whole], [same], until=15)
    other = fixed_result(lambda seed: [0.3, 0.8, 0.9], (1, 2, 3), name="other")
    comparison = compare_results([whole, other], [same, other], until=20)
    assert {row.name for row in comparison.rows} == {"task-local"}
    (line,) = comparison.notes
    assert line.startswith("other-local is not compared: other-local has no validation after step 20 for seed 1")
    assert not comparison.is_regression
    longer = fixed_result(lambda seed: [0.3, 0.5, 0.7, 0.8, 0.9], (1, 2, 3), name="other")
    shorter = longer.until(10)
    comparison = compare_results([whole, longer], [same, shorter], until=20)
    (line,) = comparison.missing
    assert line.startswith("other-local is not compared: in B, other-local has no validation after step 20 for seed 1")
    assert comparison.is_regression


def _at(seed: SeedResult, steps: Sequence[int]) -> SeedResult:
    curve = tuple((step, rate) for step, (_, rate) in zip(steps, seed.curve, strict=True))
    return seed.model_copy(update={"steps": steps[-1], "curve": curve})


def test_differences_between_the_sides_are_reported():
    a = fixed_result(lambda seed: [0.3, 0.5], (1, 2, 3)).model_copy(update={"versions": {"torch": "1", "verl": "3"}})
    b = a.model_copy(update={"versions": {"torch": ["1", "2"]}, "command": "astuner", "model": "another/model"})
    assert compare_results([a], [b]).notes == (
        f"task-local: the commands differ:\n  A: {a.command}\n  B: astuner",
        "task-local: the starting model of A is a/model, that of B another/model",
        "task-local: versions, A → B: torch 1 → 1 and 2, verl 3 → absent",
    )


def test_command_has_an_exit_code_for_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")  # the output is no terminal, so that tables are as wide as their content
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(1)
    write_result(Path("good"), simulated_result(generator, BASE))
    file = write_result(Path("bad"), simulated_result(generator, [0.3, 0.1, 0.0, 0.0, 0.0]))
    for name in ("task", "other"):
        write_result(Path("two"), simulated_result(generator, BASE, name=name))
    for words, code, text in (
        (("two", "good"), 1, "regression: B has no result of other-local"),
        (("good", "good", "--common-seeds"), 0, "no regression of B beyond noise"),
        (("good", "good"), 0, "no regression of B beyond noise"),
        (("good", "bad"), 1, "regression: B is worse than A in task-local (success after), task-local (mean of the"),
        (("good", str(file)), 1, "worse (paired)"),
        (("bad", "good"), 0, "better (paired)"),
        (("good", "missing"), 2, "does not exist"),
        (("good", "."), 2, "contains no result"),
        (("good",), 2, "Missing argument 'B'"),
        (("good", "bad", "--until", "10"), 1, "regression: B is worse than A"),
        (("good", "bad", "--until", "11"), 2, "has no validation after step 11"),
    ):
        result = CliRunner().invoke(command, ["bench", "compare", *words], standalone_mode=True)
        ended = CliRunner().invoke(command, ["bench", "compare", *words], standalone_mode=False)
        assert text in result.output, words
        assert (ended.return_value if ended.exception is None else result.exit_code) == code, words


def test_results_are_read_back_and_checked(tmp_path: Path):
    result = simulated_result(np.random.default_rng(1), BASE)
    file = write_result(tmp_path, result)
    assert read_results(tmp_path) == read_results(file) == [result]
    text = file.read_text()
    assert len([line for line in text.splitlines() if '"seed"' in line]) == 5
    content = json.loads(text)
    assert {"suite", "backbone", "model", "command", "versions", "seeds", "mean_gain", "ci95"} <= content.keys()
    assert {"seed", "before", "after", "seconds"} <= content["seeds"][0].keys()
    assert content["command"].endswith("astuner.trainer_common.test_freq=10 astuner.trainer_common.seed=SEED")
    assert [step for step, _ in content["seeds"][0]["curve"]] == [*STEPS]
    for change, message in (
        ({"mean_gain": 0.9}, "file: mean_gain is 0.9, but"),
        ({"seeds": []}, "seeds: expected one or more$"),
        (
            {"seeds": [{"seed": 1}]},
            "seeds.0.before: this key is missing\n  seeds.0.after: this key is missing\n",
        ),
        ({"ci95": [0.5, 0.1]}, "expected the lower end first"),
        ({str(number): 0 for number in range(9)}, "and 4 more$"),
    ):
        file.write_text(json.dumps(content | change))
        with pytest.raises(RecordError, match=message) as raised:
            read_results(tmp_path)
        assert "pydantic" not in str(raised.value)
    file.write_text(text)
    (tmp_path / "copy.json").write_text(text)
    with pytest.raises(RecordError, match=r"copy.json and .*task-local.json are both results of task on local"):
        read_results(tmp_path)
    (tmp_path / "out/results").mkdir(parents=True)
    with pytest.raises(RecordError, match=r"contains no result.*; did you mean .*/results\?"):
        read_results(tmp_path / "out")


def test_files_with_the_necessary_fields_only_are_compared(tmp_path: Path):
    def write(name: str, gains: Sequence[float]) -> Path:
        seeds = [{"seed": n, "before": 0.1, "after": 0.1 + gain, "seconds": 9} for n, gain in enumerate(gains)]
        content = {"suite": "task", "backbone": "local", "model": "m", "command": "c", "versions": {}, "seeds": seeds}
        interval = {"mean_gain": round(sum(gains) / len(gains), 3), "ci95": [min(gains), max(gains)]}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(content | interval))
        return file

    a = read_results(write("a", [0.5, 0.52, 0.54]))
    b = read_results(write("b", [0.3, 0.33, 0.31]))
    assert verdicts(a, b) == {("task-local", "success after"): "worse"}
    assert verdicts(a, a) == {("task-local", "success after"): "equal"}
    page = results_page(a, "plots")
    assert "| [task](#task-on-local) | local | 3 | 10.0% | 62.0% | +52.0 | 50.0 to 54.0 | – | 9 s |" in page
    assert "None" not in page
    assert "overlap" not in page
    for interval, text in (
        ((0.52, 0.6), "overlap: 52.0 to 54.0 is in all of them"),
        ((0.6, 0.7), "do not all overlap"),
    ):
        verl = a[0].model_copy(update={"backbone": "verl", "ci95": interval})
        assert f"The intervals of `task` on local, verl {text}." in results_page([*a, verl], "plots")
    draw_curves(tmp_path / "curves.png", a[0])
    assert (tmp_path / "curves.png").stat().st_size
