"""Ray's temporary folder: short paths, removal, and no removal of a live run's folder."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.backbone.ray_cluster.environment import is_too_long, preferred_parent, ray_temp_dir
from astuner.errors import BackboneError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_ray_tmpdir_is_used_and_the_folder_removed(short: Path):
    with ray_temp_dir() as folder:
        assert Path(folder).parent.parent == short
    assert list(short.iterdir()) == []


def test_a_folder_is_removed_although_a_process_writes_into_it(short: Path, monkeypatch: pytest.MonkeyPatch):
    removed = shutil.rmtree
    writes = iter(range(3))

    def removed_and_written(folder: Path, **options: bool) -> None:
        removed(folder, **options)
        if next(writes, None) is not None:
            (folder / "ray").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", removed_and_written)
    with ray_temp_dir():
        pass
    assert next(writes, None) is None
    assert list(short.iterdir()) == []


def test_a_folder_that_was_written_after_its_removal_is_removed_by_the_next_run(short: Path):
    with ray_temp_dir() as folder:
        pass
    assert list(short.iterdir()) == []
    (Path(folder) / "ray").mkdir(parents=True)
    with ray_temp_dir() as second:
        assert not Path(folder).exists()
        assert Path(second).is_dir()
    assert list(short.iterdir()) == []


@pytest.mark.parametrize("name", ["ast-my-results", "ast-0123abcd", "astuner-ray-0123abcd", "0123abcd"])
@pytest.mark.parametrize("file", ["table.csv", "owner", "0123abcd/table.csv", "0123abcd.lock"])
def test_folders_of_other_programs_are_not_removed(short: Path, name: str, file: str):
    data = short / name / file
    data.parent.mkdir(parents=True)
    data.write_text("rows")
    with ray_temp_dir():
        pass
    assert data.read_text() == "rows"


def test_other_files_among_the_folders_of_runs_are_not_removed(short: Path):
    with ray_temp_dir() as folder:
        data = Path(folder).parent / "my-results" / "table.csv"
        data.parent.mkdir()
        data.write_text("rows")
    with ray_temp_dir():
        pass
    assert data.read_text() == "rows"


def test_a_run_killed_while_it_created_its_folder_leaves_nothing(short: Path):
    home = short / f"astuner-ray-{os.getuid()}"
    home.mkdir()
    (home / "0123abcd.lock").touch()  # killed between the creation of the lock and that of the folder
    with ray_temp_dir():
        pass
    assert list(short.iterdir()) == []


def test_a_folder_is_created_while_other_runs_remove_theirs(short: Path, monkeypatch: pytest.MonkeyPatch):
    token, ends = secrets.token_hex, iter(range(3))

    def other_run_ends(size: int) -> str:
        if next(ends, None) is not None:
            (short / f"astuner-ray-{os.getuid()}").rmdir()
        return token(size)

    monkeypatch.setattr(secrets, "token_hex", other_run_ends)
    with ray_temp_dir() as folder:
        assert Path(folder).is_dir()
    assert next(ends, None) is None
    assert list(short.iterdir()) == []


def test_a_folder_of_another_user_is_refused(short: Path):
    elsewhere = short / "elsewhere"
    elsewhere.mkdir()
    (short / f"astuner-ray-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(BackboneError, match=r"belongs to another user.*RAY_TMPDIR"), ray_temp_dir():
        pass


def test_default_parent_is_the_temp_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert preferred_parent() == Path(tempfile.gettempdir())


def test_long_parent_falls_back_to_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert is_too_long(long)
    assert not is_too_long(Path("/tmp"))
    with ray_temp_dir() as folder:
        assert Path(folder).parent.parent == Path("/tmp")
    assert list(long.iterdir()) == []


def test_error_names_the_folder_and_the_fix(short: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short / "gone"))
    with pytest.raises(BackboneError, match=r"gone.*export RAY_TMPDIR=/tmp"), ray_temp_dir():
        pass


def test_only_folders_of_killed_runs_are_removed(short: Path):
    script = "import sys\nfrom astuner.backbone.ray_cluster.environment import ray_temp_dir\n"
    script += "with ray_temp_dir() as folder:\n    print(folder, flush=True)\n    sys.stdin.read()\n"
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other.stdin, other.stdout:
        theirs = Path(other.stdout.readline().strip())
        with ray_temp_dir():
            assert theirs.is_dir()
        other.kill()
        other.wait()
        assert theirs.is_dir()
        with ray_temp_dir():
            assert not theirs.exists()
