"""`summary.json`: the result of a run, in the same format for all backbones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError, model_serializer

from astuner.errors import RecordError
from astuner.run_record.files import dump_json, write_atomically
from astuner.run_record.jsonable import to_jsonable
from astuner.system.redaction.redactor import current_redactor

_FILE = "summary.json"
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ValidationSummary(_Part):
    """One pass over the validation tasks."""

    success_rate: Share | None
    """Share of the scored episodes that succeeded; None without scored episodes."""
    reward: float | None
    """Mean reward of the scored episodes; None without scored episodes."""
    episodes: NonNegativeInt
    """Number of episodes, including failed ones."""
    pass_at_k: dict[str, Share] | None = None
    """pass@k by k; omitted from the file if None."""

    @model_serializer(mode="wrap")
    def _omit_missing(self, default: Any) -> dict[str, Any]:
        values: dict[str, Any] = default(self)
        if self.pass_at_k is None:
            del values["pass_at_k"]
        return values


class ValidationsSummary(_Part):
    """The first and the last validation of a run."""

    before: ValidationSummary | None = None
    """Validation of the starting model; None if it was not validated."""
    after: ValidationSummary | None = None
    """Validation of the final model; None if it was not validated."""


class TokensSummary(_Part):
    """Token counts of the training episodes; see `astuner.schema.TokenCounts`."""

    raw: NonNegativeInt = 0
    """Prompt and completion tokens of all calls."""
    distinct: NonNegativeInt = 0
    """Distinct token prefixes within each episode, summed over episodes."""
    trained: NonNegativeInt = 0
    """Tokens with a loss."""


class EpisodesSummary(_Part):
    """Outcomes of the training episodes."""

    ok: NonNegativeInt = 0
    """Episodes with a reward that were used for training."""
    failed: NonNegativeInt = 0
    """Episodes that raised an error, hung or were not scored."""
    dropped: NonNegativeInt = 0
    """Episodes with a reward but without a trainable token."""


class RunSummary(_Part):
    """The content of `summary.json`."""

    backbone: str
    """Name of the backbone."""
    seed: NonNegativeInt
    """Value of trainer_common.seed."""
    steps: NonNegativeInt
    """Number of training steps, including those before a resume."""
    seconds: NonNegativeFloat
    """Seconds from the process's start to the run's end, with those of the processes before a resume."""
    validation: ValidationsSummary = ValidationsSummary()
    """Validation before and after training."""
    first_reward_seconds: NonNegativeFloat | None = None
    """Seconds from the start of the process to the first scored episode; None without scored episodes."""
    tokens: TokensSummary = TokensSummary()
    """Token counts of the training episodes."""
    episodes: EpisodesSummary = EpisodesSummary()
    """Outcomes of the training episodes."""
    model: str | None = None
    """Folder of the tuned model; None if none was written."""
    tasks_left_out: dict[str, NonNegativeInt] = {}
    """Tasks that the run does not use, by cause: invalid rows and filters; omitted from the file if empty."""

    @model_serializer(mode="wrap")
    def _omit_empty(self, default: Any) -> dict[str, Any]:
        values: dict[str, Any] = default(self)
        if not self.tasks_left_out:
            del values["tasks_left_out"]
        return values


def write_summary(folder: Path, summary: RunSummary) -> Path:
    """Write `summary.json` into a run's folder and return its path; `RecordError` if that fails."""
    path = folder / _FILE
    write_atomically(path, dump_json(to_jsonable(summary.model_dump(), current_redactor())) + b"\n")
    return path


def read_summary(folder: Path) -> RunSummary:
    """Read `summary.json` of a run's folder; `RecordError` if the file does not exist or holds no summary."""
    path = folder / _FILE
    try:
        return RunSummary.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}; did the run end?") from error
    except ValidationError as error:
        raise RecordError(f"{path} is not a run summary: {error}") from error
