"""Environments for programs whose packages conflict with astuner's (`astuner install appworld`)."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from astuner import __version__
from astuner.installer.env_dir import EnvDir, InstallManifest
from astuner.installer.inspection import inspect
from astuner.installer.install import find_interpreter, run_logged


@dataclass(frozen=True)
class ProgramSpec:
    """Specification of a virtual environment in which astuner is not installed.

    Attributes:
        name: its name in `astuner install NAME`.
        requirements: the requirements that pip installs.
        setup: a command that completes the installation; its first word is a program of the environment.
        next_step: the instruction that is printed after the installation; `{bin}` is the folder of the programs.
    """

    name: str
    requirements: tuple[str, ...]
    setup: tuple[str, ...]
    next_step: str


PROGRAM_SPECS = {
    spec.name: spec
    for spec in (
        ProgramSpec(
            "appworld",
            ("appworld>=0.1.3.post1,<0.2",),
            ("appworld", "install"),
            "download the tasks: {bin}/appworld download data --root DIR, then set APPWORLD_ROOT=DIR",
        ),
        ProgramSpec(
            "verifiers",
            ("verifiers>=0.4,<0.5",),
            (),
            "install your tasksets: {bin}/pip install PACKAGE",
        ),
    )
}


def install_program(
    spec: ProgramSpec, report: Callable[[str], None], *, python: str | None = None, index: str = "", fresh: bool = False
) -> None:
    """Install a program's environment. An existing one with the same requirements is left unchanged.

    The arguments are as in `InstallRequest` and for `install`.

    Raises:
        InstallError: the environment cannot be installed.
    """
    env_dir = EnvDir.of(spec.name)
    digest = hashlib.sha256("\n".join((*spec.requirements, *spec.setup)).encode()).hexdigest()
    with env_dir.locked_for_install() as lock:
        manifest = env_dir.manifest()
        if manifest is not None and manifest.digest == digest and not fresh:
            report(f"{spec.name} is already installed in {env_dir.folder}")
        else:
            started = time.monotonic()
            interpreter = find_interpreter(python)
            if env_dir.folder.exists():
                shutil.rmtree(env_dir.folder)
            env_dir.mark_incomplete()
            report(f"installing {', '.join(spec.requirements)} in {env_dir.folder} (log: {env_dir.log})")
            run_logged([interpreter, "-m", "venv", str(env_dir.folder)], env_dir, lock)
            extra = ["--extra-index-url", index] if index else []
            pip = [str(env_dir.python), "-m", "pip", "install", "--disable-pip-version-check", *extra]
            run_logged([*pip, *spec.requirements], env_dir, lock, hidden=index)
            if spec.setup:
                run_logged([str(env_dir.folder / "bin" / spec.setup[0]), *spec.setup[1:]], env_dir, lock)
            seconds = time.monotonic() - started
            size = sum(path.lstat().st_size for path in env_dir.folder.rglob("*"))
            env_dir.write_manifest(
                InstallManifest(
                    spec=spec.name,
                    digest=digest,
                    source="",
                    editable=False,
                    version=__version__,
                    python=inspect(env_dir.python).python,
                    extra=(),
                    extra_digest="",
                    seconds=seconds,
                    size=size,
                )
            )
            report(f"installed in {seconds:.0f} s, {size / 1e9:.1f} GB")
    report(f"next: {spec.next_step.format(bin=env_dir.folder / 'bin')}")
