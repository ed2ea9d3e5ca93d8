"""A small recipe of wheels made here, in place of verl's: what makes environments is real, what goes in is small."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from astuner.launcher.environments import recipes
from astuner.launcher.environments.install import Wish
from astuner.launcher.environments.packages import find_uv
from astuner.launcher.environments.places import FOLDER_VARIABLE
from astuner.launcher.environments.recipes import Recipe
from astuner.launcher.environments.source import Source


class Index:
    """A folder of wheels, which is all that pip and uv find."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, version: str, files: dict[str, str], requires: Sequence[str] = ()) -> Path:
        """Make a wheel.

        Args:
            name: the package's.
            version: its version.
            files: content by path.
            requires: what it declares to need.
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
"""What the environments here have in place of astuner: says how it was started."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The only packages that there are: `backend` 1.0 and 2.0, and an astuner that says how it was started."""
    found = Index(tmp_path / "wheels")
    for version in ("1.0", "2.0"):
        found.add("backend", version, {"backend.py": f"VERSION = {version!r}\n"})
    found.add("astuner", "0.0.1", {"astuner/__init__.py": "", "astuner/__main__.py": REPORTING_ASTUNER})
    for name, value in {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(found.folder), "PIP_CONFIG_FILE": "/dev/null",
        "UV_OFFLINE": "1", "UV_FIND_LINKS": str(found.folder), "UV_NO_CONFIG": "1", "UV_NO_CACHE": "1",
        # As a developer may have it: another environment's pins are not this one's.
        "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UV_EXTRA_INDEX_URL", raising=False)
    (tmp_path / "constraints.txt").write_text("backend==2.0\n")
    return found


@pytest.fixture(params=["pip", "uv"])
def tool(request: pytest.FixtureRequest) -> str:
    """Run the test with pip, and with uv where it is installed."""
    if request.param == "uv" and find_uv() is None:
        pytest.skip("uv is not installed here")
    return str(request.param)


@pytest.fixture
def recipe(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe for the backbone verl, of one package; environments go to tmp_path/environments."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "environments"))
    return use_recipe(small_recipe(tmp_path), monkeypatch)


def small_recipe(locks: Path, *pins: str) -> Recipe:
    """A recipe of `backend==1.0` and other pins, whose lock file is in `locks`."""
    (locks / "small.txt").write_text("\n".join(["# Pins for tests.", "backend==1.0", *pins]) + "\n")
    return Recipe(
        name="small",
        backbone="verl",
        device="cpu",
        requirements=("backend==1.0",),
        suitable=("backend==1.0",),
        imports=("backend", "astuner"),
        gigabytes=0.001,
        ran=True,
        left_out=recipes.TORCH_FRIENDS,
        locks=locks,
    )


def use_recipe(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Let it be the only recipe for verl."""
    others = [other for other in recipes.RECIPES if other.backbone != recipe.backbone]
    monkeypatch.setattr(recipes, "RECIPES", (recipe, *others))
    return recipe


@pytest.fixture
def wish(recipe: Recipe) -> Callable[..., Wish]:
    """Wish for the small recipe's environment, with astuner 0.0.1 in it."""

    def made(**settings: object) -> Wish:
        return replace(Wish(recipe, Source("astuner==0.0.1", False, "0.0.1")), **settings)  # type: ignore[arg-type]

    return made
