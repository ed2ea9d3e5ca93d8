"""The YAML file of a benchmark suite."""

from __future__ import annotations

from inspect import isclass
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from astuner.errors import ConfigError, did_you_mean, short_repr

BACKBONES = ("local", "verl", "trinity")
MAX_SEEDS = 1000
"""Maximum number of an entry's seeds."""
_MAX_PROBLEMS = 5


def _backbones(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in BACKBONES:
            raise ValueError(f"{name!r} is not a backbone that trains; expected some of {', '.join(BACKBONES)}")
    return tuple(dict.fromkeys(names))


def _unique(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if double := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise ValueError(f"the seeds {', '.join(map(str, double))} are repeated; expected each once")
    return seeds


Backbones = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_backbones)]
Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=MAX_SEEDS), AfterValidator(_unique)
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SuiteEntry(_Part):
    """One task of a suite: a configuration that is run on each backbone with each seed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*$")]
    """Name in tables, folders and result files."""
    conf: str
    """YAML file of the run: relative to the working directory, or else to the suite."""
    overrides: tuple[str, ...] = ()
    """`KEY=VALUE` of the configuration, as on the command line."""
    backbones: Backbones | None = None
    """Backbones on which the entry can run; None for those of the command line, or else local."""
    seeds: Seeds = (1, 2, 3, 4, 5)
    """Seeds; a number n stands for 1 to n."""
    seed_key: str = "astuner.trainer_common.seed"
    """Configuration key that is set to the seed."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= MAX_SEEDS:
                raise ValueError(f"{value} is not a number of seeds; expected 1 to {MAX_SEEDS}, or a list of seeds")
            return tuple(range(1, value + 1))
        return value

    @field_validator("overrides")
    @classmethod
    def _check_overrides(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for override in value:
            if "=" not in override:
                raise ValueError(f"{override!r} is not of the form KEY=VALUE")
        return value


class Suite(_Part):
    """A benchmark suite."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Name of the suite."""
    entries: Annotated[tuple[SuiteEntry, ...], Field(min_length=1)]
    """The tasks."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [entry.name for entry in self.entries]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"several entries have the name {', '.join(map(repr, double))}; rename all but one of them"
            )
        return self


def load_suite(path: Path) -> Suite:
    """Read a suite. The paths of the configurations are resolved.

    Raises:
        ConfigError: The file cannot be read, is no suite, or names a configuration that does not exist.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the suite {path}: {error.strerror or error}; expected a YAML file, such as "
            "tutorial/benchmark.yaml of the repository"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the suite {path}: {error}; expected UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        suite = Suite.model_validate({"name": path.stem, **content} if isinstance(content, dict) else content)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a suite; expected a list `entries`, each with name and conf:\n"
            f"{describe_problems(error, Suite, 'suite')}"
        ) from error
    entries = [entry.model_copy(update={"conf": str(_find(entry.conf, path))}) for entry in suite.entries]
    return suite.model_copy(update={"entries": tuple(entries)})


_EXPECTED = {
    "tuple_type": "expected a list",
    "model_type": "expected a mapping of keys to values",
    "too_short": "expected one or more",
    "missing": "this key is missing",
}
"""Texts for types of pydantic errors whose message has Python's terms."""


def describe_problems(error: ValidationError, model: type[BaseModel], whole: str) -> str:
    """Return a line for each problem in a file of type `model`, with its place, where `whole` names the whole file.

    At most five problems are described.
    """
    problems = error.errors(include_url=False)
    places = [problem["loc"] for problem in problems]
    # If an element of a list is invalid, pydantic also reports that the list is too short.
    shown = [
        problem
        for problem in problems
        if not any(place != problem["loc"] == place[: len(problem["loc"])] for place in places)
    ]
    lines = [f"  {'.'.join(map(str, problem['loc'])) or whole}: {_describe(problem, model)}" for problem in shown]
    more = [f"  and {len(lines) - _MAX_PROBLEMS} more"] if len(lines) > _MAX_PROBLEMS else []
    return "\n".join([*lines[:_MAX_PROBLEMS], *more])


def _describe(problem: ErrorDetails, model: type[BaseModel]) -> str:
    place, given = problem["loc"], problem["input"]
    if problem["type"] == "extra_forbidden":
        for part in place[:-1]:
            if field := model.model_fields.get(str(part)):
                types = (field.annotation, *get_args(field.annotation))
                model = next((type_ for type_ in types if isclass(type_) and issubclass(type_, BaseModel)), model)
        keys = list(model.model_fields)
        return "unknown key; " + (did_you_mean(place[-1], keys) or f"the keys are {', '.join(keys)}")
    if expected := _EXPECTED.get(problem["type"]):
        return f"{short_repr(given)}; {expected}" if isinstance(given, str | int | float) else expected
    if problem["type"] == "string_pattern_mismatch":
        return f"{short_repr(given)} does not match {problem['ctx']['pattern']}"
    text = problem["msg"].removeprefix("Value error, ")
    if text.startswith("Input should be ") and isinstance(given, str | int | float | None):
        return f"{short_repr(given)}; expected {text.removeprefix('Input should be ')}"
    return text


def _find(conf: str, suite: Path) -> Path:
    candidates = (Path(conf), suite.parent / conf)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = [
        file.name for candidate in candidates if candidate.parent.is_dir() for file in candidate.parent.glob("*.yaml")
    ]
    hint = did_you_mean(Path(conf).name, names, "did you mean {}?", show=str) or (
        "the path starts from the working directory or from the folder of the suite"
    )
    raise ConfigError(
        f"{suite}: there is no file {conf}, neither here ({Path.cwd()}) nor in {suite.parent.resolve()}; {hint}"
    )
