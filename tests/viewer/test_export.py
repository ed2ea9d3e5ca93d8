"""`astuner export`: the files equal the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from astuner.cli.main import astuner
from astuner.errors import RecordError
from astuner.run_record import by_token, read_index, read_recorded_episode
from tests.viewer.browser import CHROMIUM, DRIVER, Page, leaving
from tests.viewer.test_hostile import HOSTILE, NAME, assert_harmless, hostile

__all__ = ["hostile"]


def export(*arguments: object) -> None:
    astuner.main(["export", *map(str, arguments)], standalone_mode=False)


def test_json_lines_are_the_episodes(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "all.jsonl"
    export(runs / "first", "--out", out)
    entries = read_index(runs / "first")
    size = sum((runs / "first" / entry.path).stat().st_size for entry in entries)
    before, after = capsys.readouterr().err.splitlines()
    assert before == f"writing 18 episodes ({size / 1e3:.1f} kB in the record) to {out}"
    assert after == f"wrote {out.stat().st_size / 1e3:.1f} kB"
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert [row["episode"]["episode_id"] for row in rows] == [entry.episode_id for entry in entries]
    with pytest.raises(RecordError, match="not overwritten"):
        export(runs / "first", "--out", out)


def test_parquet_has_one_row_per_sample(runs: Path, tmp_path: Path):
    out = tmp_path / "samples.parquet"
    export(runs / "first", "--format", "parquet", "--out", out)
    rows = pq.read_table(out).to_pylist()
    expected = []
    for entry in read_index(runs / "first"):
        recorded = read_recorded_episode(runs / "first" / entry.path)
        expected += [(entry, *pair) for pair in zip(recorded.episode.samples, recorded.updates, strict=True)]
    assert len(rows) == len(expected) > 0
    for row, (entry, sample, update) in zip(rows, expected, strict=True):
        assert (row["advantages"], row["current_logprobs"]) == by_token(sample, update)
        assert (row["episode_id"], row["advantage"], row["weight"]) == (
            entry.episode_id,
            entry.advantage,
            sample.weight,
        )
        assert tuple(row["token_ids"]) == sample.token_ids
        assert tuple(row["loss_mask"]) == sample.train_counts
        assert tuple(row["logprobs"]) == sample.logprobs


def test_damaged_episodes_are_reported_and_skipped(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    damaged = tmp_path / "damaged"
    shutil.copytree(runs / "first", damaged)
    index = damaged / "episodes/index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[2:3] = [b"\xff\xfe\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n"]
    index.write_bytes(b"".join(lines))
    entries = read_index(runs / "first")
    (damaged / entries[4].path).write_text("{")
    (damaged / entries[5].path).unlink()
    remaining = [entry for place, entry in enumerate(entries) if place not in (2, 4, 5)]
    export(damaged, "--out", tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_bytes().splitlines()]
    assert [row["episode"]["episode_id"] for row in rows] == [entry.episode_id for entry in remaining]
    printed = capsys.readouterr().err.splitlines()
    assert len([line for line in printed if line.startswith("skipped: ")]) == 5
    for number in (3, 4, 5):
        assert any(line.startswith("skipped: ") and f"index.jsonl, line {number}: " in line for line in printed)
    for entry in entries[4:6]:
        assert any(entry.path in line for line in printed)
    export(damaged, "--format", "parquet", "--out", tmp_path / "all.parquet")
    names = pq.read_table(tmp_path / "all.parquet").column("episode_id").to_pylist()
    assert set(names) == {entry.episode_id for entry in remaining if entry.samples}
    index.write_bytes(b"".join(lines[2:5]))
    with pytest.raises(RecordError, match="nothing could be exported"):
        export(damaged, "--out", tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_paths_that_cannot_be_written_are_errors(runs: Path, tmp_path: Path):
    with pytest.raises(RecordError, match=r"cannot write .*none.*create its folder, or give another --out"):
        export(runs / "first", "--out", tmp_path / "none" / "all.jsonl")
    with pytest.raises(RecordError, match=r"is a folder; give a file with --out, such as .*episodes\.jsonl"):
        export(runs / "first", "--out", tmp_path)


def test_html_needs_an_episode(runs: Path):
    with pytest.raises(RecordError, match="--episode"):
        export(runs / "first", "--format", "html")


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver on the PATH")
def test_an_html_file_is_self_contained(browser: Any, runs: Path, hostile: Path, tmp_path: Path):
    plain, bad = tmp_path / "episode.html", tmp_path / "hostile.html"
    export(runs / "first", "--format", "html", "--episode", "train-000002-sum/0-1", "--out", plain)
    export(hostile / NAME, "--format", "html", "--episode", HOSTILE["script"], "--out", bad)
    with leaving(browser) as driver:
        page = Page(driver, plain.as_uri())
        page.open("?timeline=2")
        assert page.texts("h1") == ["train-000002-sum/0-1"]
        assert {"Messages of timeline 2", "Tokens of timeline 2"} < set(page.texts("h2"))
        page.element("[data-at='3']").click()
        page.wait(lambda: page.all(".tip:not([hidden])"))
        assert_harmless(page)
        page = Page(driver, bad.as_uri())
        page.open("")
        page.element(".tokens .t")
        assert_harmless(page)
