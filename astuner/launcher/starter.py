"""`astuner init`: a starter project that runs without changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from astuner.errors import ConfigError

_PROJECT = Path(__file__).parent / "starter_project"
_TEMPLATES = Path(__file__).parent / "starter_templates"
# Packaging tools leave out names that start with a dot.
_FOLDERS = {"vscode": ".vscode"}
# Files of the project that a template does not use.
_UNUSED = {"command": ("judge.py",), "gymnasium": ("agent.py", "judge.py", "tasks")}

TEMPLATES = ("chat", "agentscope", "openai", "langgraph", "gymnasium", "two-agents", "command")
"""The names of the templates; `chat` is the default."""
REQUIREMENTS = {"langgraph": ("langgraph", "langgraph"), "gymnasium": ("gymnasium", "gymnasium")}
"""The module that a template needs, and the extra of astuner that installs it."""


@dataclass(frozen=True)
class StarterFiles:
    """Files of a starter project, relative to its folder; `existing` ones are unchanged."""

    written: tuple[str, ...]
    existing: tuple[str, ...]


def start_project(folder: Path, template: str = "chat") -> StarterFiles:
    """Write the starter project into `folder`. Existing files are not overwritten.

    The template's files replace the default project's. ConfigError: a file cannot be written.
    """
    sources = _files(_PROJECT)
    sources = {path: source for path, source in sources.items() if path.parts[0] not in _UNUSED.get(template, ())}
    sources |= _files(_TEMPLATES / template)
    written, existing = [], []
    for path, source in sorted(sources.items()):
        target = folder / path
        if target.exists():
            existing.append(str(path))
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"cannot write {target}: {error.strerror or error}; give `astuner init` a writable folder"
            ) from error
        written.append(str(path))
    return StarterFiles(tuple(written), tuple(existing))


def _files(folder: Path) -> dict[Path, Path]:
    files = {}
    for source in folder.rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            first, *rest = source.relative_to(folder).parts
            files[Path(_FOLDERS.get(first, first), *rest)] = source
    return files
