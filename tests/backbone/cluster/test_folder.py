"""The folder of a run's own Ray: short enough, removed, and never that of a run that lives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.backbone.cluster.folder import is_too_long, ray_folder, wanted_parent
from astuner.errors import BackboneError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_the_folder_is_where_the_user_says_and_goes(short: Path):
    with ray_folder() as folder:
        assert Path(folder).parent == short
    assert list(short.iterdir()) == []


def test_without_a_wish_it_is_in_the_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert wanted_parent() == Path(tempfile.gettempdir())


def test_a_long_folder_gives_way_to_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert is_too_long(long)
    assert not is_too_long(Path("/tmp"))
    with ray_folder() as folder:
        assert Path(folder).parent == Path("/tmp")
    assert list(long.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_with_the_mend(short: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short / "gone"))
    with pytest.raises(BackboneError, match=r"gone.*export RAY_TMPDIR=/tmp"), ray_folder():
        pass


def test_only_what_was_left_behind_is_removed(short: Path):
    script = "import sys\nfrom astuner.backbone.cluster.folder import ray_folder\n"
    script += "with ray_folder() as folder:\n    print(folder, flush=True)\n    sys.stdin.read()\n"
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other.stdin, other.stdout:
        theirs = Path(other.stdout.readline().strip())
        with ray_folder():
            assert theirs.is_dir()
        other.kill()
        other.wait()
        assert theirs.is_dir()
        with ray_folder():
            assert not theirs.exists()
