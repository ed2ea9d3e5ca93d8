"""`astuner install`: making a backbone's environment."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from astuner.errors import InstallError
from astuner.launcher.environments.inspection import Inspection, inspect
from astuner.launcher.environments.packages import Packages, find_interpreter, find_uv
from astuner.launcher.environments.places import Place, Receipt
from astuner.launcher.environments.recipes import SUPPORTED_PYTHONS, Recipe
from astuner.launcher.environments.source import Source
from astuner.launcher.environments.versions import plain_name, unmet


@dataclass(frozen=True)
class Wish:
    """What an environment is to be.

    Attributes:
        recipe: its pins.
        source: the astuner that goes in.
        python: interpreter, None for the running one.
        extra: the user's requirement files, None for those of the environment that is there.
        folder: where to, None for where it is or the usual place.
        index: a further package index, "" for none.
        pip: use pip although uv is there.
        fresh: make it anew even if it is there, and forget earlier requirement files.
    """

    recipe: Recipe
    source: Source
    python: str | None = None
    extra: tuple[Path, ...] | None = None
    folder: Path | None = None
    index: str = ""
    pip: bool = False
    fresh: bool = False


def install(wish: Wish, say: Callable[[str], None]) -> Receipt:
    """Make the environment, or do nothing where it is there as wished.

    What an interrupted installation left is made anew. Of two installations at once, the second waits for the first.

    Args:
        wish: what it is to be.
        say: told what is done, line by line.

    Raises:
        InstallError: it cannot be made, or does not import; says what to do.
    """
    place = Place.of(wish.recipe.backbone)
    with place.kept_for_installing() as lock:
        before = None if wish.fresh else place.receipt()
        wish = _completed(wish, before)
        if before is not None:
            reason = _why_anew(wish, place, before)
            if reason is None and (before.source, before.version) == (wish.source.requirement, wish.source.version):
                say(f"{wish.recipe.name} is already there: {place.folder} (astuner {before.version}, {before.source})")
                return before
            say(f"{wish.recipe.name} is made anew: {reason}" if reason else f"astuner is now {wish.source}")
            if reason is None:
                return _Installation(wish, place, lock, say).renew_astuner(before)
        elif place.is_unfinished():
            say(f"an installation of {wish.recipe.backbone} was interrupted; it is made anew")
        return _Installation(wish, place, lock, say).make()


def _completed(wish: Wish, before: Receipt | None) -> Wish:
    """Fill in what an earlier installation has said already."""
    if wish.extra is None:
        wish = replace(wish, extra=tuple(Path(file) for file in before.extra) if before else ())
    for file in wish.extra or ():
        if not file.is_file():
            mend = (
                "give it again, or leave it out with --fresh" if before and str(file) in before.extra else "correct it"
            )
            raise InstallError(f"--with {file}: there is no such file; {mend}")
    return wish


def _why_anew(wish: Wish, place: Place, before: Receipt) -> str | None:
    """Say why an environment has to be made anew, None if it may stay."""
    if before.digest != wish.recipe.digest:
        changed = before.recipe == wish.recipe.name
        return "its lock file has changed" if changed else f"it is {before.recipe}"
    if before.extra_digest != _digest_of(wish.extra or ()):
        return "the requirements of --with have changed"
    if wish.folder is not None and wish.folder.resolve() != place.folder:
        return f"it is in {place.folder}"
    try:
        found = inspect(place.python)
    except InstallError as error:
        return str(error)
    if wish.python is not None and found.python != _version_of(wish.python):
        return f"it has Python {found.python}"
    lacking = unmet([f"{name}=={version}" for name, version in wish.recipe.pins.items()], found.installed)
    return f"it was changed: {lacking[0]}" if lacking else None


def _version_of(python: str) -> str | None:
    try:
        return inspect(Path(find_interpreter(python, uv=find_uv() is not None))).python
    except InstallError:  # for uv to find, which need not be here yet
        return None


def _digest_of(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


class _Installation:
    def __init__(self, wish: Wish, place: Place, lock: int, say: Callable[[str], None]) -> None:
        self._wish, self._place, self._say, self._began = wish, place, say, time.monotonic()
        self._recipe, self._extra = wish.recipe, tuple(file.absolute() for file in wish.extra or ())
        folder = wish.folder.resolve() if wish.folder else place.folder
        self._packages = Packages(folder, place.log, lock, wish.index, None if wish.pip else find_uv())

    def make(self) -> Receipt:
        """Make the environment from nothing."""
        interpreter = find_interpreter(self._wish.python, uv=self._packages.uv is not None)
        self._clear()
        self._check_disk()
        self._place.log.write_text("")
        self._place.begin()
        self._say(f"making {self._recipe.name} in {self._place.folder} with {self._packages.tool}")
        self._packages.make(interpreter)
        self._check_python()
        with tempfile.TemporaryDirectory() as folder:
            pins = self._write(Path(folder) / f"{self._recipe.name}.txt", self._recipe.pins)
            builder = self._write(Path(folder) / "builder.txt", self._only("setuptools"))
            self._packages.install(["--no-deps", "--requirement", str(builder)])
            self._install_astuner()
            if self._extra:
                self._check_extra(pins)
            torch = self._only("torch")
            if torch:
                self._say("installing PyTorch")
                self._packages.install(
                    ["--no-deps", "--requirement", str(self._write(Path(folder) / "torch.txt", torch))]
                )
                self._check_build()
            self._say(f"installing {len(self._recipe.pins)} packages")
            self._packages.install(["--no-deps", "--requirement", str(pins)])
            if self._extra:
                self._say(f"installing what {', '.join(file.name for file in self._extra)} asks for")
                self._packages.install(self._extra_arguments(pins))
        return self._finished()

    def renew_astuner(self, before: Receipt) -> Receipt:
        """Put another astuner into an environment that is as wished but for that."""
        self._place.begin()
        self._install_astuner()
        return self._finished()

    def _finished(self) -> Receipt:
        found = self._verified()
        size = _size_of(self._place.folder)
        receipt = Receipt(
            recipe=self._recipe.name,
            digest=self._recipe.digest,
            source=self._wish.source.requirement,
            editable=self._wish.source.editable,
            version=self._wish.source.version,
            python=found.python,
            extra=tuple(str(file) for file in self._extra),
            extra_digest=_digest_of(self._extra),
            seconds=round(time.monotonic() - self._began, 1),
            size=size,
        )
        self._place.finish(receipt)
        self._say(f"took {receipt.seconds:.0f} s and {size / 1e9:.1f} GB of disk")
        return receipt

    def _clear(self) -> None:
        """Delete what is there, if `astuner install` made it."""
        link, wanted = self._place.link, self._wish.folder
        if not self._place.is_ours():
            raise InstallError(
                f"{self._place.folder} is there and was not made by `astuner install`, so it is not deleted; move it "
                "away, or give another folder with --path"
            )
        if wanted is not None and wanted.absolute() != link and wanted.resolve() != self._place.folder:
            if self._place.folder.exists():
                self._say(f"deleting {self._place.folder}")
                shutil.rmtree(self._place.folder)
            if link.is_symlink():
                link.unlink()
            link.symlink_to(wanted.absolute(), target_is_directory=True)
            return self._clear()
        if self._place.folder.exists():
            self._place.begin()
            # The mark goes last: what a killed deletion leaves is still known to be ours.
            for entry in sorted(self._place.folder.iterdir(), key=lambda entry: entry.name.startswith("astuner-")):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        return None

    def _check_disk(self) -> None:
        there = next(folder for folder in (self._place.folder, *self._place.folder.parents) if folder.exists())
        free = shutil.disk_usage(there).free / 1e9
        if free < self._recipe.gigabytes:
            raise InstallError(
                f"{self._recipe.name} takes about {self._recipe.gigabytes:.1f} GB, and {there} has {free:.1f} GB free; "
                "free some, or choose another disk with --path"
            )

    def _check_python(self) -> None:
        version = inspect(self._packages.python).python
        if not version.startswith(tuple(f"{known}." for known in SUPPORTED_PYTHONS)):
            raise InstallError(
                f"the lock files are for Python {' and '.join(SUPPORTED_PYTHONS)}, and this would have {version}; "
                "choose an interpreter with --python, such as --python python3.11"
            )

    def _install_astuner(self) -> None:
        self._say(f"installing astuner {self._wish.source.version} from {self._wish.source}")
        self._packages.install(["--no-deps", *self._wish.source.arguments])

    def _check_extra(self, pins: Path) -> None:
        """Resolve the user's requirements against the pins, before gigabytes are fetched."""
        self._say("resolving --with against the pins")
        for file in self._extra:
            _check_against(file, self._recipe)
        try:
            self._packages.install(self._extra_arguments(pins), dry_run=True)
        except InstallError as error:
            raise InstallError(
                f"what {', '.join(str(file) for file in self._extra)} asks for does not go together with the pins of "
                f"{self._recipe.name} ({self._recipe.lock}), which the backbone needs; loosen it. {error}"
            ) from None

    def _extra_arguments(self, pins: Path) -> list[str]:
        wanted = [part for file in self._extra for part in ("--requirement", str(file))]
        return ["--constraint", str(pins), *wanted]

    def _check_build(self, found: Inspection | None = None) -> None:
        """Check that PyTorch is built for the device that was asked for."""
        found = found or inspect(self._packages.python)
        if "torch" not in found.installed or (found.cuda is not None) == (self._recipe.device == "cuda"):
            return
        backbone, version = self._recipe.backbone, found.installed["torch"]
        if self._recipe.device == "cpu":
            configured = (
                "or set UV_TORCH_BACKEND=cpu; if pip is configured to find CPU builds, add --pip"
                if self._packages.uv
                else "or configure it for pip"
            )
            raise InstallError(
                f"the package index gave PyTorch {version} built for CUDA {found.cuda}, and --cpu was asked for. Name "
                f"the index of CPU builds, which PyTorch's own installation guide has: `astuner install {backbone} "
                f"--cpu --index URL`, {configured}; or use the GPU: `astuner install {backbone} --cuda`"
            )
        raise InstallError(
            f"the package index gave PyTorch {version}, a build without CUDA, and --cuda was asked for. Name an index "
            f"that has CUDA builds with `astuner install {backbone} --cuda --index URL`, or use the CPU: "
            f"`astuner install {backbone} --cpu`"
        )

    def _verified(self) -> Inspection:
        """Import everything; say the versions."""
        self._say("importing everything")
        python = self._packages.python
        broken = sorted(inspect(python, [f"{name}?" for name in self._recipe.left_out]).failed)
        if broken:
            self._say(f"removing {', '.join(broken)}: not built for this PyTorch, and would keep others from importing")
            self._packages.remove(broken)
        found = inspect(python, self._recipe.imports)
        self._check_build(found)
        if found.failed:
            errors = "\n".join(f"  {name}: {error}" for name, error in found.failed.items())
            raise InstallError(
                f"{self._recipe.name} is installed in {self._place.folder}, and does not import:\n{errors}\n"
                f"what {self._packages.tool} said is in {self._place.log}"
            )
        for line in found.contradictions(self._recipe.known_faults):
            self._say(f"note: {line}")
        shown = dict.fromkeys(plain_name(Requirement(line).name) for line in self._recipe.suitable)
        names = ("torch", "transformers", *shown)
        versions = [f"{name} {found.installed[name]}" for name in dict.fromkeys(names) if name in found.installed]
        self._say(f"Python {found.python}, astuner {self._wish.source.version}, {', '.join(versions)}")
        return found

    def _only(self, name: str) -> dict[str, str]:
        return {name: self._recipe.pins[name]} if name in self._recipe.pins else {}

    @staticmethod
    def _write(file: Path, pins: dict[str, str]) -> Path:
        file.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        return file


def _check_against(file: Path, recipe: Recipe) -> None:
    """Name both sides where a line of the user's contradicts a pin; what contradicts further down, pip or uv finds."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            wanted = Requirement(line.partition(" #")[0].strip())
        except InvalidRequirement:  # an option, a path, a comment
            continue
        pin = recipe.pins.get(plain_name(wanted.name))
        if pin is not None and not wanted.specifier.contains(pin, prereleases=True):
            raise InstallError(
                f"{file}:{number} asks for {wanted.name}{wanted.specifier}, and {recipe.name} has {wanted.name} {pin} "
                f"({recipe.lock}), with which the backbone was tested; loosen that line"
            )


def _size_of(folder: Path) -> int:
    """Bytes on the disk, a file with several names once."""
    blocks = {}
    for path in folder.rglob("*"):
        entry = path.lstat()
        blocks[entry.st_ino] = entry.st_blocks
    return 512 * sum(blocks.values())
