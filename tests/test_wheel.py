"""The wheel contains the whole package, and the installed viewer serves its pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from astuner.run_record.record import RunRecord

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the package, built from a copy of its source and of folders beside it."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("astuner", "bench", "campaigns"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(made)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = made.glob("*.whl")
    return built


@contextmanager
def open_process(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command that needs nothing of this environment; end it after."""
    environment = {"HOME": str(folder)}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_a_wheel_holds_every_file_of_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "astuner").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packaged == {path.relative_to(ROOT).as_posix() for path in files}


def test_the_viewer_of_a_wheel_serves_its_pages(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    with RunRecord.open(tmp_path / "run", backbone="local", config_yaml="", resume=False, loggers=()):
        pass
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from astuner.__main__ import main; main()"
    command = [sys.executable, "-c", code, str(tmp_path / "installed"), "view", str(tmp_path / "run"), "--port", "0"]
    with open_process(command, tmp_path) as process:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert address is not None
        with httpx.Client(base_url=address[0]) as page:
            index = page.get("/").text
            linked = re.findall(r'(?:href|src)="([^"#]+)"', index)
            (folder,) = {link.partition("/")[0] for link in linked}
            static = ROOT / "astuner/viewer/static"
            files = [path for path in static.rglob("*") if path.is_file() and path.name != "index.html"]
            assert {static / link.partition("/")[2] for link in linked} <= set(files)
            for path in files:
                got = page.get(f"/{folder}/{path.relative_to(static).as_posix()}")
                assert (got.status_code, got.content) == (200, path.read_bytes())
            assert [run["name"] for run in page.get("/api/runs").json()] == ["run"]
