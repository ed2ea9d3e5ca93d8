"""Installation of the backbones' environments with pip (`astuner install`)."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from astuner.errors import InstallError
from astuner.installer.env_dir import EnvDir, InstallManifest
from astuner.installer.env_specs import SUPPORTED_PYTHONS, EnvSpec
from astuner.installer.inspection import Inspection, Source, inspect, isolated_variables, unmet

_LOG_TAIL = 25


@dataclass(frozen=True)
class InstallRequest:
    """Arguments of an installation.

    Attributes:
        python: interpreter as a path, command or version; None for the interpreter of this process.
        extra: the user's requirement files; None for the existing environment's files.
        folder: folder of the environment; None for the existing folder, or else the default folder.
        index: URL of an additional package index, "" for none.
        fresh: reinstall an existing environment, and forget its requirement files.
    """

    spec: EnvSpec
    source: Source
    python: str | None = None
    extra: tuple[Path, ...] | None = None
    folder: Path | None = None
    index: str = ""
    fresh: bool = False


def install(request: InstallRequest, report: Callable[[str], None]) -> InstallManifest:
    """Install an environment, or update the existing one where it differs from the request.

    An interrupted installation is repeated from the start. Concurrent installations wait for each other. `report` is
    called with each line of progress.

    Raises:
        InstallError: the environment cannot be installed, or its packages do not import.
    """
    env_dir = EnvDir.of(request.spec.backbone)
    with env_dir.locked_for_install() as lock:
        manifest = None if request.fresh else env_dir.manifest()
        previous = manifest.extra if manifest else ()
        if request.extra is None:
            request = replace(request, extra=tuple(map(Path, previous)))
        for file in request.extra or ():
            if not file.is_file():
                fix = "pass it again, or drop it with --fresh" if str(file) in previous else "correct the path"
                raise InstallError(f"--with {file}: no such file; {fix}")
        installer = _Installer(request, env_dir, lock, report)
        if manifest is None:
            if env_dir.is_incomplete():
                report(f"the last installation of {request.spec.backbone} was interrupted; starting again")
        elif (reason := _reason_to_reinstall(request, env_dir, manifest)) is not None:
            report(f"reinstalling {request.spec.name}: {reason}")
        elif (manifest.source, manifest.version) == (request.source.requirement, request.source.version):
            report(
                f"{request.spec.name} is already installed in {env_dir.folder} (astuner {manifest.version} from "
                f"{manifest.source})"
            )
            return manifest
        else:
            return installer.update_astuner()
        return installer.install()


def _reason_to_reinstall(request: InstallRequest, env_dir: EnvDir, manifest: InstallManifest) -> str | None:
    """Return why the existing environment cannot be updated in place, None if it can."""
    if manifest.digest != request.spec.digest:
        is_same_spec = manifest.spec == request.spec.name
        return "its lock file has changed" if is_same_spec else f"the environment is {manifest.spec}"
    if manifest.extra_digest != _digest(request.extra or ()):
        return "the requirements given with --with have changed"
    if request.folder is not None and request.folder.resolve() != env_dir.folder:
        return f"it is in {env_dir.folder}"
    try:
        env = inspect(env_dir.python)
    except InstallError as error:
        return str(error)
    if request.python is not None and env.python != inspect(find_interpreter(request.python)).python:
        return f"it has Python {env.python}"
    changed = unmet(_lines(request.spec.pins), env.installed.get)
    return f"it was changed: {changed[0]}" if changed else None


class _Installer:
    def __init__(self, request: InstallRequest, env_dir: EnvDir, lock: int, report: Callable[[str], None]) -> None:
        self._request, self._env_dir, self._lock, self._report = request, env_dir, lock, report
        self._spec, self._started = request.spec, time.monotonic()
        self._extra = tuple(file.absolute() for file in request.extra or ())

    def install(self) -> InstallManifest:
        interpreter = find_interpreter(self._request.python)
        version = inspect(interpreter).python
        if not version.startswith(tuple(f"{supported}." for supported in SUPPORTED_PYTHONS)):
            raise InstallError(
                f"the lock files are for Python {' and '.join(SUPPORTED_PYTHONS)}, but {interpreter} is Python "
                f"{version}; choose another interpreter, for example with --python python3.11"
            )
        self._clear_folder()
        target = self._env_dir.folder
        parent = next(path for path in (target, *target.parents) if path.exists())
        free = shutil.disk_usage(parent).free / 1e9
        if free < self._spec.disk_gb:
            raise InstallError(
                f"{self._spec.name} needs about {self._spec.disk_gb:.1f} GB, but {parent} has only {free:.1f} GB free; "
                "free some space, or choose another disk with --path"
            )
        self._env_dir.log.write_text("")
        self._env_dir.mark_incomplete()
        self._report(f"creating {self._spec.name} in {self._env_dir.folder}")
        self._run([interpreter, "-m", "venv", str(self._env_dir.folder)])
        with tempfile.TemporaryDirectory() as folder:
            pins = Path(folder) / f"{self._spec.name}.txt"
            pins.write_text("\n".join(_lines(self._spec.pins)))
            extra = [
                "--constraint",
                str(pins),
                *(part for file in self._extra for part in ("--requirement", str(file))),
            ]
            names = ", ".join(file.name for file in self._extra)
            if self._extra:
                self._report(f"resolving {names} with the pinned versions")
                self._check_extra(extra)
            if "torch" in self._spec.pins:
                # Before the rest: a wrong build is found before gigabytes are downloaded.
                self._report("installing PyTorch")
                self._pip_install(["--no-deps", f"torch=={self._spec.pins['torch']}"])
                self._check_torch_build(inspect(self._env_dir.python))
            self._report(f"installing {len(self._spec.pins)} packages")
            self._pip_install(["--no-deps", "--requirement", str(pins)])
            self._install_astuner()
            if self._extra:
                self._report(f"installing the requirements of {names}")
                self._pip_install(extra)
        return self._finish()

    def update_astuner(self) -> InstallManifest:
        """Replace astuner in an environment that is otherwise up to date."""
        self._env_dir.mark_incomplete()
        if "pip" not in inspect(self._env_dir.python).installed:  # environments from earlier versions, created by uv
            self._run([str(self._env_dir.python), "-m", "ensurepip"])
        self._install_astuner()
        return self._finish()

    def _clear_folder(self) -> None:
        """Delete the existing environment, and link to the requested folder if it is a different folder."""
        link, current = self._env_dir.link, self._env_dir.folder
        folder = self._request.folder.resolve() if self._request.folder else current
        for path in {current: None, folder: None}:
            if not EnvDir(self._spec.backbone, path).is_removable():
                raise InstallError(
                    f"{path} exists and was not created by `astuner install`, so it is not deleted; move it away, or "
                    "choose another folder with --path"
                )
        for path in {current: None, folder: None}:
            if path.exists():
                self._report(f"deleting {path}")
                EnvDir(self._spec.backbone, path).mark_incomplete()
                # The marker goes last, so that an interrupted deletion can be repeated.
                for entry in sorted(path.iterdir(), key=lambda entry: entry.name.startswith("astuner-")):
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
        if folder != current:
            if current.exists():
                current.rmdir()
            link.unlink(missing_ok=True)
            link.symlink_to(folder, target_is_directory=True)

    def _check_extra(self, arguments: Sequence[str]) -> None:
        """Check the user's requirements against the pins: direct conflicts by line, indirect ones through pip."""
        for file in self._extra:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                try:
                    requirement = Requirement(line.partition(" #")[0].strip())
                except InvalidRequirement:  # an option, a path or a comment
                    continue
                pin = self._spec.pins.get(canonicalize_name(requirement.name))
                if pin is not None and not requirement.specifier.contains(pin, prereleases=True):
                    raise InstallError(
                        f"{file}:{number} requires {requirement.name}{requirement.specifier}, but {self._spec.name} "
                        f"pins {requirement.name} {pin} ({self._spec.lock}); relax that line"
                    )
        try:
            self._pip_install(["--dry-run", *arguments])
        except InstallError as error:
            raise InstallError(
                f"the requirements in {', '.join(map(str, self._extra))} conflict with the pins of {self._spec.name} "
                f"({self._spec.lock}); relax them. {error}"
            ) from None

    def _check_torch_build(self, env: Inspection) -> None:
        wrong_build = env.wrong_torch_build(self._spec.device)
        if wrong_build is not None:
            command = f"astuner install {self._spec.backbone}"
            is_cpu = self._spec.device == "cpu"
            raise InstallError(
                f"{wrong_build}. The package index supplied that build; name an index of "
                f"{'CPU' if is_cpu else 'CUDA'} builds (see PyTorch's installation guide) with "
                f"`{command} --{self._spec.device} --index URL`, or configure it for pip. To use the "
                f"{'GPU' if is_cpu else 'CPU'} instead: `{command} --{'cuda' if is_cpu else 'cpu'}`"
            )

    def _install_astuner(self) -> None:
        source = self._request.source
        self._report(f"installing astuner {source.version} from {source.requirement}")
        self._pip_install(["--no-deps", *source.pip_arguments])

    def _finish(self) -> InstallManifest:
        """Check that everything imports, and write the manifest."""
        self._report("importing everything")
        python, spec = self._env_dir.python, self._spec
        broken = sorted(inspect(python, [f"{name}?" for name in spec.excluded]).import_errors)
        if broken:
            self._report(f"uninstalling {', '.join(broken)}, which is built for another PyTorch and breaks imports")
            self._run([str(python), "-m", "pip", "uninstall", "--yes", *broken])
        env = inspect(python, spec.imports)
        self._check_torch_build(env)
        if env.import_errors:
            errors = "\n".join(f"  {name}: {error}" for name, error in env.import_errors.items())
            raise InstallError(
                f"{spec.name} is installed in {self._env_dir.folder}, but modules do not import:\n{errors}\n"
                f"the output of pip is in {self._env_dir.log}"
            )
        for conflict in env.conflicts(spec.expected_conflicts):
            self._report(f"note: {conflict}")
        names = ["torch", "transformers", *(Requirement(line).name for line in spec.runtime_requirements)]
        versions = [
            f"{n} {env.installed[n]}" for n in dict.fromkeys(map(canonicalize_name, names)) if n in env.installed
        ]
        self._report(", ".join([f"Python {env.python}", f"astuner {self._request.source.version}", *versions]))
        # Blocks on disk, so that a file with several hard links counts once.
        entries = [path.lstat() for path in self._env_dir.folder.rglob("*")]
        manifest = InstallManifest(
            spec=spec.name,
            digest=spec.digest,
            source=self._request.source.requirement,
            editable=self._request.source.editable,
            version=self._request.source.version,
            python=env.python,
            extra=tuple(map(str, self._extra)),
            extra_digest=_digest(self._extra),
            seconds=round(time.monotonic() - self._started, 1),
            size=512 * sum({entry.st_ino: entry.st_blocks for entry in entries}.values()),
        )
        self._env_dir.write_manifest(manifest)
        self._report(f"finished in {manifest.seconds:.0f} s, {manifest.size / 1e9:.1f} GB on disk")
        return manifest

    def _pip_install(self, arguments: Sequence[str]) -> None:
        index = ["--extra-index-url", self._request.index] if self._request.index else []
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        self._run([str(self._env_dir.python), "-m", "pip", "install", *options, *index, *arguments])

    def _run(self, command: Sequence[str]) -> None:
        run_logged(command, self._env_dir, self._lock, hidden=self._request.index)


def run_logged(command: Sequence[str], env_dir: EnvDir, lock: int, *, hidden: str = "") -> None:
    """Run a command of an installation, with its output in the log.

    Args:
        command: the program and its arguments.
        env_dir: the environment.
        lock: the lock's descriptor, which the command inherits.
        hidden: an argument that the log does not show, such as an index's URL, which may contain a password.

    Raises:
        InstallError: the command fails. The message has the last lines of its output.
    """
    with env_dir.log.open("a+") as log:
        log.write(f"\n$ {' '.join('URL' if hidden and word == hidden else word for word in command)}\n")
        log.flush()
        start = log.tell()
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=isolated_variables(),
                pass_fds=[lock],  # keeps the environment locked while the command lives
                check=False,
            )
        except OSError as error:
            raise InstallError(f"{command[0]} cannot be started: {error}") from error
        if done.returncode:
            log.seek(start)
            tail = [line for line in log.read().splitlines() if line.strip()][-_LOG_TAIL:]
            raise InstallError(
                f"{' '.join(command[1:4])} failed with exit code {done.returncode}; its output is in "
                f"{env_dir.log}. The last lines:\n  " + "\n  ".join(tail)
            )


def _lines(pins: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in pins.items()]


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def find_interpreter(name: str | None) -> str:
    """Return the path of an interpreter from a path, a command or a version; None stands for the running interpreter.

    Raises:
        InstallError: the interpreter is not found.
    """
    if name is None:
        return sys.executable
    interpreter = shutil.which(str(Path(name).expanduser())) or shutil.which(f"python{name}")
    if interpreter is None:
        raise InstallError(f"--python {name}: no such interpreter; give a path, or a command such as python3.11")
    return interpreter
