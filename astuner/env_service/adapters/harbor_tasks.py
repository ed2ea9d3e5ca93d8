"""Reads task folders in the format of Harbor (https://www.harborframework.com/docs/tasks), for the sandbox."""

from __future__ import annotations

import base64
import fnmatch
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from astuner.errors import EnvError, short_repr

BASE_IMAGES = ("ubuntu", "debian", "python", "bash", "buildpack-deps", "*/t-bench/ubuntu-*", "*/t-bench/python-*")
"""Images without files that a task needs, apart from programs that most machines have."""

_CWD = "/app"
_AGENT_SECONDS = _VERIFIER_SECONDS = 600.0  # Harbor's defaults
# The host's folders in the sandbox, and the verifier's, which the agent does not see.
_RESERVED = {
    "usr",
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "etc",
    "proc",
    "sys",
    "dev",
    "nix",
    "logs",
    "tests",
    "solution",
}
_DOWNLOAD = re.compile(
    r"(?:^|[\s;&|(])(apt-get|apt|apk|yum|dnf|curl|wget|uvx|uv|npm|conda|git clone|pip3? install|-m pip install)(?:\s|$)"
)
_WITHOUT_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")


class UnsupportedTaskError(EnvError):
    """A task needs more than the sandbox; the message is the reason."""


@dataclass(frozen=True)
class HarborTask:
    """A task.

    Attributes:
        cwd: the working directory.
        copies: files and folders of `environment/`, and their absolute paths in the sandbox, in order.
        env: environment variables of the commands.
        agent_seconds: the time limit for all agent commands together.
        verifier_seconds, verifier_env: the time limit for the tests, and their environment variables.
        memory, storage: in bytes; None if the task does not say.
        metadata: the table `metadata` of task.toml.
    """

    folder: Path
    instruction: str
    cwd: str
    copies: Sequence[tuple[Path, str]]
    env: Mapping[str, str]
    agent_seconds: float
    verifier_seconds: float
    verifier_env: Mapping[str, str]
    memory: int | None
    storage: int | None
    metadata: Mapping[str, Any]

    def solution(self) -> str | None:
        """Return the command that solves the task; None if there is no solution/solve.sh."""
        folder = self.folder / "solution"
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if folder / "solve.sh" not in paths:
            return None
        if len(paths) == 1:
            return paths[0].read_text()
        lines = [f"mkdir -p {shlex.quote(f'/solution/{path.parent.relative_to(folder)}')}" for path in paths]
        for path in paths:
            target = shlex.quote(f"/solution/{path.relative_to(folder)}")
            lines.append(f"base64 -d > {target} <<END\n{base64.encodebytes(path.read_bytes()).decode()}END")
        return "\n".join([*lines, "bash /solution/solve.sh"])


def find_tasks(folder: Path) -> list[Path]:
    """Return the task folders in a folder, or the folder itself if it is one, sorted by name.

    Raises:
        EnvError: the folder contains no task.
    """
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml")) if folder.is_dir() else []
    if not found:
        raise EnvError(
            f"{folder} has no Harbor tasks; expected a folder with task.toml and instruction.md, or a folder of them"
        )
    return found


def read_task(folder: Path, base_images: Sequence[str] = ()) -> HarborTask:
    """Read a task.

    Args:
        folder: the folder with `task.toml`, `instruction.md`, `environment/`, `tests/` and `solution/`.
        base_images: patterns of further base images from which the task needs no files.

    Raises:
        UnsupportedTaskError: the task needs an image, the network or a device.
        EnvError: a file is missing or invalid.
    """
    try:
        config = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text().strip() if "steps" not in config else ""
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EnvError(f"the Harbor task {folder} cannot be read: {error}") from error
    sections = {name: config.get(name, {}) for name in ("environment", "agent", "verifier", "metadata")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise EnvError(f"{folder / 'task.toml'}: {name} must be a table, got {short_repr(section)}")
    environment, agent, verifier = sections["environment"], sections["agent"], sections["verifier"]
    images = (*BASE_IMAGES, *base_images)
    for reason in _unsupported(folder, config, environment, verifier, images):
        raise UnsupportedTaskError(reason)
    build = _read_dockerfile(folder / "environment", images)
    return HarborTask(
        folder=folder,
        instruction=instruction,
        cwd=build.cwd,
        copies=build.copies,
        env=build.env | _variables(environment.get("env"), "environment.env"),
        agent_seconds=_seconds(folder, agent, "agent", _AGENT_SECONDS),
        verifier_seconds=_seconds(folder, verifier, "verifier", _VERIFIER_SECONDS),
        verifier_env=_variables(verifier.get("env"), "verifier.env"),
        memory=_bytes(folder, environment, "memory"),
        storage=_bytes(folder, environment, "storage"),
        metadata=sections["metadata"],
    )


def _unsupported(folder: Path, config: Any, environment: Any, verifier: Any, images: Sequence[str]) -> Iterator[str]:
    """Yield the reasons for which the sandbox cannot run a task."""
    image = environment.get("docker_image")
    if "steps" in config:
        yield "it has several steps ([[steps]])"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            yield f"it needs Docker Compose (environment/{name})"
    if image is not None and not _is_base(str(image), images):
        yield f"it needs the container image {short_repr(image)} (environment.docker_image)"
    if environment.get("gpus") or environment.get("gpu_types"):
        yield "it needs a GPU (environment.gpus)"
    if environment.get("allow_internet") or environment.get("network_mode") in ("public", "allowlist"):
        yield "it needs the network (environment.allow_internet)"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"it needs another operating system ({environment['os']})"
    if environment.get("mcp_servers"):
        yield "it needs MCP servers (environment.mcp_servers)"
    if verifier.get("environment") or verifier.get("environment_mode", "shared") != "shared":
        yield "its tests need an environment of their own (verifier.environment)"
    script = folder / "tests/test.sh"
    if not script.is_file():
        yield "it has no tests/test.sh"
    else:
        lines = [line for line in script.read_text().splitlines() if not line.lstrip().startswith("#")]
        for call in filter(None, map(_DOWNLOAD.search, lines)):
            yield f"tests/test.sh calls `{call[1]}`, which needs the network"


@dataclass
class _Build:
    """The effect of a Dockerfile."""

    cwd: str = _CWD
    copies: list[tuple[Path, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


def _read_dockerfile(context: Path, images: Sequence[str]) -> _Build:
    build, path = _Build(), context / "Dockerfile"
    if not path.is_file():
        build.copies = [(context, _CWD)] if context.is_dir() else []
        return build
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages = 0
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        keyword, rest = keyword.upper(), rest.strip()
        if keyword == "FROM":
            stages += 1
            name = next(word for word in rest.split() if not word.startswith("--"))
            if stages > 1 or not _is_base(name, images):
                raise UnsupportedTaskError(
                    f"it needs the container image {short_repr(name)} (environment/Dockerfile). If the task needs no "
                    "file of the image, add it to the parameter base_images"
                )
        elif keyword == "WORKDIR":
            build.cwd = _checked_target(str(PurePosixPath(build.cwd, _plain(rest))), "the working directory")
            build.folders.add(build.cwd)
        elif keyword in ("COPY", "ADD"):
            _copy(build, context, keyword, rest)
        elif keyword == "ENV":
            words = shlex.split(_plain(rest))
            pairs = (
                [word.partition("=")[::2] for word in words] if "=" in words[0] else [(words[0], " ".join(words[1:]))]
            )
            build.env.update(pairs)
        elif keyword == "USER" and rest in ("root", "0"):
            pass
        elif keyword and keyword not in _WITHOUT_EFFECT:
            raise UnsupportedTaskError(f"it needs a container image: environment/Dockerfile has `{line.strip()[:80]}`")
    return build


def _copy(build: _Build, context: Path, keyword: str, rest: str) -> None:
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        if not flag.startswith("--chown="):
            raise UnsupportedTaskError(f"it needs a container image: environment/Dockerfile has `{keyword} {flag}`")
    words = json.loads(rest) if rest.startswith("[") else shlex.split(_plain(rest))
    patterns, target = words[:-1], words[-1]
    sources = [path for pattern in patterns for path in _matching(context, pattern)]
    is_archive = keyword == "ADD" and any(".tar" in path.name or path.suffix == ".tgz" for path in sources)
    if is_archive or any("://" in pattern for pattern in patterns):
        raise UnsupportedTaskError(f"it needs a container image: environment/Dockerfile has `{keyword} {rest[:80]}`")
    path = str(PurePosixPath(build.cwd, target))
    is_folder = target.endswith(("/", ".")) or len(sources) > 1 or path in {build.cwd, *build.folders}
    for source in sources:
        to = f"{path}/{source.name}" if source.is_file() and is_folder else path
        build.copies.append((source, _checked_target(to, "the target of COPY")))
        build.folders.add(path if source.is_dir() or is_folder else str(PurePosixPath(path).parent))


def _matching(context: Path, pattern: str) -> list[Path]:
    name = pattern.strip("/") or "."
    found = [context] if name == "." else sorted(context.glob(name))
    found = [path for path in found if path.resolve().is_relative_to(context.resolve())]
    if not found and "://" not in pattern:
        raise EnvError(f"{context / 'Dockerfile'} copies {short_repr(pattern)}, and there is no such file in {context}")
    return found


def _checked_target(path: str, what: str) -> str:
    parts = PurePosixPath(path).parts
    if ".." in parts or len(parts) < 2 or parts[1] in _RESERVED:
        raise UnsupportedTaskError(f"it needs a container image: {what} is {path}")
    return path


def _plain(text: str) -> str:
    if "$" in text:
        raise UnsupportedTaskError(f"environment/Dockerfile uses a variable: `{text[:80]}`")
    return text


def _is_base(image: str, images: Sequence[str]) -> bool:
    name = image.partition("@")[0]
    untagged = re.sub(r":[^/]*$", "", name).removeprefix("docker.io/").removeprefix("library/")
    return any(fnmatch.fnmatch(candidate, pattern) for pattern in images for candidate in (name, untagged))


def _variables(values: object, key: str) -> dict[str, str]:
    if not isinstance(values, Mapping | None):
        raise EnvError(f"{key} of task.toml must be a table, got {short_repr(values)}")
    for name, value in (values or {}).items():
        if "${" in str(value):
            raise UnsupportedTaskError(f"it needs the variable {name} of the host ({key})")
    return {str(name): str(value) for name, value in (values or {}).items()}


def _seconds(folder: Path, section: Mapping[str, Any], name: str, default: float) -> float:
    value = section.get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise EnvError(f"{folder / 'task.toml'}: {name}.timeout_sec must be positive seconds, got {short_repr(value)}")
    return float(value)


def _bytes(folder: Path, environment: Mapping[str, Any], name: str) -> int | None:
    """Return `memory_mb` in bytes, or the older `memory`, for example 4G."""
    value = environment.get(f"{name}_mb", environment.get(name))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", str(value).strip().upper())
    if value is None:
        return None
    if match is None or not float(match[1]) > 0:
        raise EnvError(f"{folder / 'task.toml'}: environment.{name} must be a size such as 2G, got {short_repr(value)}")
    unit = "M" if f"{name}_mb" in environment else match[2]
    return int(float(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit])
