"""A small specification instead of verl's. Its wheels are built by the tests, so installations are real but small."""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.installer import env_specs
from astuner.installer.env_dir import EnvDir
from astuner.installer.env_specs import EnvSpec
from astuner.installer.inspection import Source
from astuner.installer.install import InstallRequest, install, run_logged
from astuner.system.paths import FOLDER_VARIABLE

SOURCE = Source("astuner==0.0.1", False, "0.0.1")


class Index:
    """A folder of wheels, the only packages that pip finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, version: str, files: dict[str, str], requires: Sequence[str] = ()) -> Path:
        """Build a wheel.

        Args:
            name: name of the package.
            version: its version.
            files: content by path.
            requires: its declared requirements.
        """
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
        content = {
            **files,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in content.items())
        wheel = self.folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in {**content, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
                archive.writestr(path, text)
        return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


REPORTING_ASTUNER = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "arguments": sys.argv[1:], "folder": os.getcwd(), "prefix": sys.prefix,
    "path": os.environ["PATH"].split(os.pathsep)[0], "kept": os.environ.get("KEPT"),
}), flush=True)
if "astuner.experiment_name=wait" in sys.argv:
    import time
    time.sleep(60)
"""
"""Stand-in for astuner in the environments: prints how it was started."""


def new_index(folder: Path) -> Index:
    """Build an index of `backend` 1.0 and 2.0, and an astuner that prints how it was started."""
    wheels = Index(folder)
    for version in ("1.0", "2.0"):
        wheels.add("backend", version, {"backend.py": f"VERSION = {version!r}\n"})
    wheels.add("astuner", "0.0.1", {"astuner/__init__.py": "", "astuner/__main__.py": REPORTING_ASTUNER})
    return wheels


def use_index(wheels: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Let pip find the packages of an index only."""
    for name, value in {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels.folder), "PIP_CONFIG_FILE": "/dev/null",
        # As a developer may have it. The pins of another environment must not apply.
        "PIP_CONSTRAINT": str(wheels.folder.with_name("constraints.txt")),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    wheels.folder.with_name("constraints.txt").write_text("backend==2.0\n")
    return wheels


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index of `backend` 1.0 and 2.0, and an astuner that prints how it was started."""
    return use_index(new_index(tmp_path / "wheels"), monkeypatch)


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip only, which is slow to create."""
    folder = tmp_path_factory.mktemp("environment") / "empty"
    venv.create(folder, with_pip=True)
    return folder


def copy_venvs(empty_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a prepared virtual environment where the installer would create one with the running interpreter."""

    def copy_or_run(command: Sequence[str], env_dir: EnvDir, lock: int, **options: Any) -> None:
        if list(command[:3]) == [sys.executable, "-m", "venv"]:
            shutil.copytree(empty_environment, command[3], symlinks=True, dirs_exist_ok=True)
        else:
            run_logged(command, env_dir, lock, **options)

    for module in ("install", "programs"):
        monkeypatch.setattr(f"astuner.installer.{module}.run_logged", copy_or_run)


@pytest.fixture
def quick_venv(empty_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a prepared virtual environment instead of creating one."""
    copy_venvs(empty_environment, monkeypatch)


@pytest.fixture(scope="session")
def installed_environment(empty_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that `astuner install` makes of the small specification, which takes three starts of pip."""
    folder = tmp_path_factory.mktemp("installed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_index(new_index(folder / "wheels"), monkeypatch)
        copy_venvs(empty_environment, monkeypatch)
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "environments"))
        install(InstallRequest(use_spec(small_spec(folder), monkeypatch), SOURCE), print)
        return EnvDir.of("verl").folder


@pytest.fixture
def small_is_installed(spec: EnvSpec, installed_environment: Path) -> None:
    """The small specification is installed in tmp_path/environments: a virtual environment can be copied."""
    shutil.copytree(installed_environment, EnvDir.of("verl").folder, symlinks=True)


@pytest.fixture
def spec(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    """A specification for the backbone verl, of one package; environments are in tmp_path/environments."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "environments"))
    return use_spec(small_spec(tmp_path), monkeypatch)


def small_spec(lock_dir: Path, *pins: str) -> EnvSpec:
    """Return a specification of `backend==1.0` and other pins, with its lock file in `lock_dir`."""
    (lock_dir / "small.txt").write_text("\n".join(["# Pins for tests.", "backend==1.0", *pins]) + "\n")
    return EnvSpec(
        name="small",
        backbone="verl",
        device="cpu",
        requirements=("backend==1.0",),
        runtime_requirements=("backend==1.0",),
        imports=("backend", "astuner"),
        disk_gb=0.001,
        tested=True,
        excluded=env_specs.TORCH_EXTENSIONS,
        lock_dir=lock_dir,
    )


def use_spec(spec: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    """Make it the only specification for its backbone."""
    others = [other for other in env_specs.ENV_SPECS if other.backbone != spec.backbone]
    monkeypatch.setattr(env_specs, "ENV_SPECS", (spec, *others))
    return spec


@pytest.fixture
def request_for(spec: EnvSpec, quick_venv: None) -> Callable[..., InstallRequest]:
    """Return requests for the small specification's environment, with astuner 0.0.1."""

    def make(**settings: object) -> InstallRequest:
        return replace(InstallRequest(spec, SOURCE), **settings)  # type: ignore[arg-type]

    return make
