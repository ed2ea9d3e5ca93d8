"""`astuner install`: environments are made, found again, mended and kept from each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.errors import InstallError
from astuner.launcher.environments.inspection import inspect
from astuner.launcher.environments.install import Wish, install
from astuner.launcher.environments.places import Place
from astuner.launcher.environments.source import Source
from tests.launcher.environments.conftest import Index, small_recipe, use_recipe

Making = Callable[..., Wish]
REPOSITORY = Path(__file__).parents[3]


def installed() -> dict[str, str]:
    return inspect(Place.of("verl").python).installed


def test_an_environment_is_made_once(wish: Making, tool: str, tmp_path: Path):
    said: list[str] = []
    receipt = install(wish(pip=tool == "pip"), said.append)
    assert said[0] == f"making small in {tmp_path}/environments/verl with {tool}"
    assert installed().items() >= {"backend": "1.0", "astuner": "0.0.1"}.items()
    assert receipt.size == pytest.approx(
        int(subprocess.check_output(["du", "-s", "-B1", Place.of("verl").folder]).split()[0]), rel=0.2
    )
    said.clear()
    assert install(wish(), said.append) == receipt
    assert said == [f"small is already there: {tmp_path}/environments/verl (astuner 0.0.1, astuner==0.0.1)"]


def test_what_is_not_as_wished_is_made_anew(
    wish: Making, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    install(wish(), said.append)
    environment = Place.of("verl")
    kept = environment.folder / "kept"

    def again(reason: str, **settings: object) -> None:
        kept.touch()
        said.clear()
        install(wish(**settings), said.append)
        assert reason in said[0]
        assert not kept.exists()

    (metadata,) = environment.folder.glob("lib/*/site-packages/backend-1.0.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("1.0", "2.0"))
    again("it was changed: backend==1.0 (2.0 is there)")
    assert installed()["backend"] == "1.0"
    index.add("more", "1.0", {"more.py": ""})
    again("its lock file has changed", recipe=use_recipe(small_recipe(tmp_path, "more==1.0"), monkeypatch))
    assert "more" in installed()
    (tmp_path / "mine.txt").write_text("# nothing\n")
    again(
        "the requirements of --with have changed",
        recipe=small_recipe(tmp_path, "more==1.0"),
        extra=(tmp_path / "mine.txt",),
    )


def test_another_astuner_is_put_in_without_the_rest(wish: Making, index: Index):
    said: list[str] = []
    install(wish(), said.append)
    (Place.of("verl").folder / "kept").touch()
    index.add("astuner", "0.0.2", {"astuner/__init__.py": ""})
    receipt = install(wish(source=Source("astuner==0.0.2", False, "0.0.2")), said.append)
    assert (receipt.version, installed()["astuner"]) == ("0.0.2", "0.0.2")
    assert (Place.of("verl").folder / "kept").exists()


def test_the_users_requirements_go_in_and_stay(wish: Making, index: Index, tmp_path: Path):
    index.add("agent", "3.0", {"agent.py": ""}, ["backend<2"])
    mine = tmp_path / "requirements.txt"
    mine.write_text("agent  # what my workflow imports\n")
    receipt = install(wish(extra=(mine,)), print)
    assert installed()["agent"] == "3.0"
    assert receipt.extra == (str(mine),)
    assert install(wish(), print) == receipt  # not given again, it stays
    mine.unlink()
    with pytest.raises(InstallError, match=r"requirements\.txt: there is no such file; give it again, or .* --fresh"):
        install(wish(), print)
    install(wish(fresh=True), print)
    assert "agent" not in installed()


def test_conflicts_name_both_sides(wish: Making, index: Index, tool: str, tmp_path: Path):
    mine = tmp_path / "requirements.txt"
    mine.write_text("\n--no-binary none\nBackend >= 2 ; python_version > '3'  # newer\n")
    with pytest.raises(InstallError, match=r"requirements\.txt:3 asks for Backend>=2, and small has Backend 1\.0"):
        install(wish(extra=(mine,), pip=tool == "pip"), print)
    index.add("agent", "3.0", {"agent.py": ""}, ["backend>=2"])
    mine.write_text("agent\n")
    with pytest.raises(InstallError) as failed:
        install(wish(extra=(mine,), pip=tool == "pip"), print)
    for part in ("requirements.txt", "small.txt", "agent", "backend>=2", "backend==1.0"):
        assert part in str(failed.value)
    assert Place.of("verl").receipt() is None


def test_a_package_that_is_not_to_be_found(wish: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = use_recipe(small_recipe(tmp_path, "nowhere==1.0"), monkeypatch)
    with pytest.raises(InstallError, match=r"failed \(exit code [12]\)(.|\n)*nowhere"):
        install(wish(recipe=missing), print)
    assert "nowhere" in Place.of("verl").log.read_text()


def test_modules_that_do_not_import_are_named(wish: Making, index: Index):
    index.add("backend", "1.0", {"backend.py": "raise OSError('no such library')\n"})
    with pytest.raises(InstallError, match=r"does not import:\n  backend: OSError: no such library"):
        install(wish(), print)
    index.add("backend", "1.0", {"backend.py": "print('hello')\n"})
    said: list[str] = []
    install(wish(), said.append)
    assert said[0] == "an installation of verl was interrupted; it is made anew"


def test_pytorch_of_the_wrong_build_is_found_before_the_rest(
    wish: Making, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index.add("torch", "2.13.0", {"torch/__init__.py": "raise OSError", "torch/version.py": "cuda = '13.0'\n"})
    recipe = use_recipe(small_recipe(tmp_path, "torch==2.13.0"), monkeypatch)
    with pytest.raises(InstallError, match=r"gave PyTorch 2\.13\.0 built for CUDA 13\.0, and --cpu was asked for"):
        install(wish(recipe=recipe), print)
    assert "backend" not in installed()
    index.add("torch", "2.13.0", {"torch/__init__.py": "", "torch/version.py": "cuda = None\n"})
    install(wish(recipe=recipe), print)


def test_what_is_not_built_for_this_pytorch_is_taken_out(wish: Making, index: Index, tmp_path: Path):
    index.add("torchvision", "0.28", {"torchvision/__init__.py": "raise RuntimeError('operator nms does not exist')"})
    index.add("torchaudio", "2.11", {"torchaudio/__init__.py": ""})
    mine = tmp_path / "requirements.txt"
    mine.write_text("torchvision\ntorchaudio\n")
    said: list[str] = []
    install(wish(extra=(mine,)), said.append)
    assert any(line.startswith("removing torchvision: ") for line in said)
    assert "torchaudio" in installed()
    assert "torchvision" not in installed()


def test_another_folder(wish: Making, tmp_path: Path):
    elsewhere = tmp_path / "big disk" / "mine"
    install(wish(), print)
    install(wish(folder=elsewhere), print)
    place = Place.of("verl")
    assert place.link.is_symlink()
    assert place.folder == elsewhere
    assert str(elsewhere) in inspect(place.python).prefix
    said: list[str] = []
    install(wish(), said.append)
    assert "already there" in said[0]
    install(wish(folder=tmp_path / "third"), print)
    assert not elsewhere.exists()


def test_what_is_not_ours_is_not_deleted(wish: Making, tmp_path: Path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis").write_text("…")
    with pytest.raises(InstallError, match=r"home is there and was not made by `astuner install`"):
        install(wish(folder=precious, fresh=True), print)
    assert (precious / "thesis").read_text() == "…"


def test_interpreters(wish: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InstallError, match="--python python9: there is no such interpreter"):
        install(wish(python="python9", pip=True), print)
    monkeypatch.setattr("astuner.launcher.environments.install.SUPPORTED_PYTHONS", ("3.9",))
    with pytest.raises(InstallError, match=r"for Python 3\.9, and this would have 3\."):
        install(wish(python=sys.executable), print)


def test_a_full_disk_is_found_before(wish: Making, recipe: object, tmp_path: Path):
    from dataclasses import replace

    with pytest.raises(InstallError, match=r"takes about 1000000000\.0 GB, and .* GB free"):
        install(wish(recipe=replace(small_recipe(tmp_path), gigabytes=1e9)), print)


def test_of_two_at_once_the_second_waits(wish: Making, capsys: pytest.CaptureFixture[str]):
    said: list[list[str]] = [[], []]
    threads = [threading.Thread(target=install, args=(wish(), lines.append)) for lines in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = sorted(said, key=len, reverse=True)
    assert first[0].startswith("making small")
    assert "already there" in second[0]
    assert f"process {os.getpid()} is installing verl; waiting until it ends" in capsys.readouterr().err
    assert installed()["backend"] == "1.0"


INSTALLING = """
import sys
from pathlib import Path
from astuner.launcher.environments.install import Wish, install
from astuner.launcher.environments.source import Source
from tests.launcher.environments.conftest import small_recipe
install(Wish(small_recipe(Path(sys.argv[1])), Source("astuner==0.0.1", False, "0.0.1"), python=sys.argv[2]), print)
"""


def test_a_killed_installation_is_done_again(wish: Making, tmp_path: Path):
    slow, began = tmp_path / "slow-python", tmp_path / "began"
    # An interpreter that takes its time with `-m venv`, and outlives who started it.
    slow.write_text(f'#!/bin/sh\n[ "$2" = venv ] && touch {began} && sleep 2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": os.defpath}
    process = subprocess.Popen([sys.executable, "-c", INSTALLING, str(tmp_path), str(slow)], env=variables)
    while not began.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Place.of("verl").is_unfinished()
    said: list[str] = []
    install(wish(), said.append)
    assert said[0] == "an installation of verl was interrupted; it is made anew"
    assert installed()["backend"] == "1.0"
    assert not Place.of("verl").is_unfinished()


USING = """
import sys
from astuner.launcher.environments.places import Place
Place.of("verl").keep_for_running()
print(flush=True)
sys.stdin.read()
"""


def test_an_environment_in_use_stays(wish: Making, index: Index):
    install(wish(), print)
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.Popen([sys.executable, "-c", USING], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.readline()
    with pytest.raises(InstallError, match="a run is using the environment of verl"):
        install(wish(fresh=True), print)
    run.communicate()
    install(wish(fresh=True), print)
