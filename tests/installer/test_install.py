"""`astuner install`: environments are installed, recognized, updated, repaired and locked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from astuner.errors import InstallError
from astuner.installer.env_dir import EnvDir
from astuner.installer.inspection import Source, inspect
from astuner.installer.install import InstallRequest, install
from astuner.installer.programs import ProgramSpec, install_program
from astuner.system.paths import FOLDER_VARIABLE, installed_program
from tests.installer.conftest import Index, small_spec, use_spec

RequestFor = Callable[..., InstallRequest]
REPOSITORY = Path(__file__).parents[2]


def installed() -> dict[str, str]:
    return inspect(EnvDir.of("verl").python).installed


def test_an_environment_is_installed_once(request_for: RequestFor, tmp_path: Path):
    lines: list[str] = []
    manifest = install(request_for(), lines.append)
    assert lines[0] == f"creating small in {tmp_path}/environments/verl"
    assert installed().items() >= {"backend": "1.0", "astuner": "0.0.1"}.items()
    assert manifest.size == pytest.approx(
        int(subprocess.check_output(["du", "-s", "-B1", EnvDir.of("verl").folder]).split()[0]), rel=0.2
    )
    lines.clear()
    assert install(request_for(), lines.append) == manifest
    assert lines == [f"small is already installed in {tmp_path}/environments/verl (astuner 0.0.1 from astuner==0.0.1)"]


def test_a_manifest_of_an_earlier_version_is_accepted(request_for: RequestFor):
    manifest = install(request_for(), print)
    written = {
        "recipe": "small",
        "digest": manifest.digest,
        "source": "astuner==0.0.1",
        "editable": False,
        "version": "0.0.1",
        "python": manifest.python,
        "extra": [],
        "extra_digest": manifest.extra_digest,
        "seconds": 1.5,
        "size": 1000,
    }
    file = EnvDir.of("verl").folder / "astuner-environment.json"
    assert json.loads(file.read_text()).keys() == written.keys()
    file.write_text(json.dumps(written))
    lines: list[str] = []
    assert install(request_for(), lines.append).seconds == 1.5
    assert "already installed" in lines[0]


def test_astuner_is_updated_in_an_environment_without_pip(
    request_for: RequestFor, small_is_installed: None, index: Index
):
    python = EnvDir.of("verl").python  # as earlier versions created it with uv
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", "pip"], check=True, capture_output=True)
    index.add("astuner", "0.0.2", {"astuner/__init__.py": ""})
    install(request_for(source=Source("astuner==0.0.2", False, "0.0.2")), print)
    assert installed()["astuner"] == "0.0.2"


def test_an_environment_that_differs_is_reinstalled(
    request_for: RequestFor, small_is_installed: None, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    environment = EnvDir.of("verl")
    marker = environment.folder / "marker"

    def check_reinstalled(reason: str, **settings: object) -> None:
        marker.touch()
        lines.clear()
        install(request_for(**settings), lines.append)
        assert reason in lines[0]
        assert not marker.exists()

    (metadata,) = environment.folder.glob("lib/*/site-packages/backend-1.0.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("1.0", "2.0"))
    check_reinstalled("it was changed: backend==1.0 (2.0 is installed)")
    assert installed()["backend"] == "1.0"
    index.add("more", "1.0", {"more.py": ""})
    spec = use_spec(small_spec(tmp_path, "more==1.0"), monkeypatch)
    check_reinstalled("its lock file has changed", spec=spec)
    assert "more" in installed()
    (tmp_path / "extra.txt").write_text("# nothing\n")
    check_reinstalled("the requirements given with --with have changed", spec=spec, extra=(tmp_path / "extra.txt",))


def test_only_astuner_is_replaced_when_only_it_changed(request_for: RequestFor, small_is_installed: None, index: Index):
    lines: list[str] = []
    (EnvDir.of("verl").folder / "marker").touch()
    index.add("astuner", "0.0.2", {"astuner/__init__.py": ""})
    manifest = install(request_for(source=Source("astuner==0.0.2", False, "0.0.2")), lines.append)
    assert (manifest.version, installed()["astuner"]) == ("0.0.2", "0.0.2")
    assert (EnvDir.of("verl").folder / "marker").exists()


def test_the_users_requirements_are_installed_and_remembered(request_for: RequestFor, index: Index, tmp_path: Path):
    index.add("agent", "3.0", {"agent.py": ""}, ["backend<2"])
    extra = tmp_path / "requirements.txt"
    extra.write_text("agent  # what my workflow imports\n")
    manifest = install(request_for(extra=(extra,)), print)
    assert installed()["agent"] == "3.0"
    assert manifest.extra == (str(extra),)
    assert install(request_for(), print) == manifest  # remembered, though not passed again
    extra.unlink()
    with pytest.raises(InstallError, match=r"requirements\.txt: no such file; pass it again, or .* --fresh"):
        install(request_for(), print)
    install(request_for(fresh=True), print)
    assert "agent" not in installed()


def test_conflicts_name_both_sides(request_for: RequestFor, index: Index, tmp_path: Path):
    extra = tmp_path / "requirements.txt"
    extra.write_text("\n--no-binary none\nBackend >= 2 ; python_version > '3'  # newer\n")
    with pytest.raises(InstallError, match=r"requirements\.txt:3 requires Backend>=2, but small pins Backend 1\.0"):
        install(request_for(extra=(extra,)), print)
    index.add("agent", "3.0", {"agent.py": ""}, ["backend>=2"])
    extra.write_text("agent\n")
    with pytest.raises(InstallError) as failed:
        install(request_for(extra=(extra,)), print)
    for part in ("requirements.txt", "small.txt", "agent", "backend>=2", "backend==1.0"):
        assert part in str(failed.value)
    assert EnvDir.of("verl").manifest() is None


def test_a_package_that_the_index_lacks(request_for: RequestFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = use_spec(small_spec(tmp_path, "nowhere==1.0"), monkeypatch)
    with pytest.raises(InstallError, match=r"pip install failed with exit code [12](.|\n)*nowhere"):
        install(request_for(spec=missing), print)
    assert "nowhere" in EnvDir.of("verl").log.read_text()


def test_modules_that_do_not_import_are_named(request_for: RequestFor, index: Index):
    index.add("backend", "1.0", {"backend.py": "raise OSError('no such library')\n"})
    with pytest.raises(InstallError, match=r"do not import:\n  backend: OSError: no such library"):
        install(request_for(), print)
    index.add("backend", "1.0", {"backend.py": "print('hello')\n"})
    lines: list[str] = []
    install(request_for(), lines.append)
    assert lines[0] == "the last installation of verl was interrupted; starting again"


def test_a_wrong_build_of_pytorch_is_found_before_the_rest(
    request_for: RequestFor, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index.add("torch", "2.13.0", {"torch/__init__.py": "raise OSError", "torch/version.py": "cuda = '13.0'\n"})
    spec = use_spec(small_spec(tmp_path, "torch==2.13.0"), monkeypatch)
    with pytest.raises(
        InstallError, match=r"torch 2\.13\.0 is built for CUDA 13\.0, but the environment is for the CPU"
    ):
        install(request_for(spec=spec), print)
    assert "backend" not in installed()
    index.add("torch", "2.13.0", {"torch/__init__.py": "", "torch/version.py": "cuda = None\n"})
    install(request_for(spec=spec), print)


def test_packages_built_for_another_pytorch_are_uninstalled(request_for: RequestFor, index: Index, tmp_path: Path):
    index.add("torchvision", "0.28", {"torchvision/__init__.py": "raise RuntimeError('operator nms does not exist')"})
    index.add("torchaudio", "2.11", {"torchaudio/__init__.py": ""})
    extra = tmp_path / "requirements.txt"
    extra.write_text("torchvision\ntorchaudio\n")
    lines: list[str] = []
    install(request_for(extra=(extra,)), lines.append)
    assert any(line.startswith("uninstalling torchvision, ") for line in lines)
    assert "torchaudio" in installed()
    assert "torchvision" not in installed()


def test_another_folder(request_for: RequestFor, small_is_installed: None, tmp_path: Path):
    elsewhere = tmp_path / "big disk" / "folder"
    install(request_for(folder=elsewhere), print)
    place = EnvDir.of("verl")
    assert place.link.is_symlink()
    assert place.folder == elsewhere
    assert str(elsewhere) in inspect(place.python).prefix
    lines: list[str] = []
    install(request_for(), lines.append)
    assert "already installed" in lines[0]
    install(request_for(folder=tmp_path / "third"), print)
    assert not elsewhere.exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "file").touch()
    with pytest.raises(InstallError, match="foreign exists and was not created"):
        install(request_for(folder=foreign), print)
    assert EnvDir.of("verl").folder == tmp_path / "third"
    assert installed()["backend"] == "1.0"


def test_foreign_folders_are_not_deleted(request_for: RequestFor, tmp_path: Path):
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis").write_text("…")
    with pytest.raises(InstallError, match=r"home exists and was not created by `astuner install`"):
        install(request_for(folder=foreign, fresh=True), print)
    assert (foreign / "thesis").read_text() == "…"


def test_interpreters(request_for: RequestFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InstallError, match="--python python9: no such interpreter"):
        install(request_for(python="python9"), print)
    install(request_for(python=".".join(map(str, sys.version_info[:2]))), print)
    monkeypatch.setattr("astuner.installer.install.SUPPORTED_PYTHONS", ("3.9",))
    with pytest.raises(InstallError, match=r"for Python 3\.9, but .* is Python 3\."):
        install(request_for(python=sys.executable, fresh=True), print)


def test_a_full_disk_is_found_first(request_for: RequestFor, tmp_path: Path):
    with pytest.raises(InstallError, match=r"needs about 1000000000\.0 GB, but .* GB free"):
        install(request_for(spec=replace(small_spec(tmp_path), disk_gb=1e9)), print)


def test_the_second_of_two_concurrent_installations_waits(request_for: RequestFor, capsys: pytest.CaptureFixture[str]):
    outputs: list[list[str]] = [[], []]
    threads = [threading.Thread(target=install, args=(request_for(), lines.append)) for lines in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = sorted(outputs, key=len, reverse=True)
    assert first[0].startswith("creating small")
    assert "already installed" in second[0]
    assert f"process {os.getpid()} is installing verl; waiting for it to finish" in capsys.readouterr().err
    assert installed()["backend"] == "1.0"


INSTALLING = """
import sys
from pathlib import Path
from astuner.installer.install import InstallRequest, install
from astuner.installer.inspection import Source
from tests.installer.conftest import small_spec
spec, source = small_spec(Path(sys.argv[1])), Source("astuner==0.0.1", False, "0.0.1")
install(InstallRequest(spec, source, python=sys.argv[2]), print)
"""


def test_a_killed_installation_is_repeated(request_for: RequestFor, tmp_path: Path):
    slow, started, ended = tmp_path / "slow-python", tmp_path / "started", tmp_path / "ended"
    # An interpreter that is slow at `-m venv`, and outlives the process that started it.
    venv = f'touch {started} && sleep 2 && mkdir -p "$3" && touch "$3/late" {ended} && exit'
    slow.write_text(f'#!/bin/sh\n[ "$2" = venv ] && {venv}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": os.defpath}
    process = subprocess.Popen([sys.executable, "-c", INSTALLING, str(tmp_path), str(slow)], env=variables)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert EnvDir.of("verl").is_incomplete()
    lines: list[str] = []
    install(request_for(), lines.append)
    assert lines[0] == "the last installation of verl was interrupted; starting again"
    assert installed()["backend"] == "1.0"
    assert not EnvDir.of("verl").is_incomplete()
    # It waited for the slow interpreter, which has the lock, and deleted its file.
    assert ended.exists()
    assert not (EnvDir.of("verl").folder / "late").exists()


USING = """
import sys
from astuner.installer.env_dir import EnvDir
EnvDir.of("verl").lock_for_run()
print(flush=True)
sys.stdin.read()
"""


def test_an_environment_in_use_is_not_replaced(request_for: RequestFor, small_is_installed: None, index: Index):
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.Popen([sys.executable, "-c", USING], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.readline()
    with pytest.raises(InstallError, match="a run is using the environment of verl"):
        install(request_for(fresh=True), print)
    run.communicate()
    install(request_for(fresh=True), print)


def test_an_environment_of_a_program_has_no_astuner(
    index: Index, quick_venv: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "environments"))
    setup = ("python", "-c", "import backend, sys; open(sys.prefix + '/ready', 'w').write(str(backend.VERSION))")
    spec = ProgramSpec("appworld", ("backend<2",), setup, "call {bin}/backend")
    lines: list[str] = []
    install_program(spec, lines.append)
    programs = tmp_path / "environments/appworld/bin"
    assert (programs.parent / "ready").read_text() == "1.0"
    assert lines[-1] == f"next: call {programs}/backend"
    assert installed_program("appworld", "python") == str(programs / "python")
    assert installed_program("appworld", "none") is None
    lines.clear()
    install_program(spec, lines.append)
    assert "already installed" in lines[0]
    with pytest.raises(InstallError, match=r"no-such-package(?s:.*)"):
        install_program(replace(spec, requirements=("no-such-package",)), lines.append)
    assert "already installed" not in lines[-1]
