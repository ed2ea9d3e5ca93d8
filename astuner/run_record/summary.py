"""`summary.json`: how a run ended, in the same form for all backbones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError, model_serializer

from astuner.errors import RecordError
from astuner.run_record.files import dump_json, write_atomically
from astuner.run_record.plain import to_plain
from astuner.run_record.secrets import current_redactor

_FILE = "summary.json"
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ValidationSummary(_Part):
    """One pass over the validation tasks."""

    success_rate: Share | None
    """Share of the scored episodes that succeeded; None where none was scored."""
    reward: float | None
    """Mean reward of the scored episodes; None where none was scored."""
    episodes: NonNegativeInt
    """Episodes that were run, failed ones included."""
    pass_at_k: dict[str, Share] | None = None
    """pass@k by k; left out of the file where None."""

    @model_serializer(mode="wrap")
    def _leave_out_missing(self, default: Any) -> dict[str, Any]:
        values: dict[str, Any] = default(self)
        if self.pass_at_k is None:
            del values["pass_at_k"]
        return values


class ValidationsSummary(_Part):
    """The first and the last validation of a run."""

    before: ValidationSummary | None = None
    """Of the starting model; None where it was not validated."""
    after: ValidationSummary | None = None
    """Of the final model; None where it was not validated."""


class TokensSummary(_Part):
    """Tokens of the training episodes; see `astuner.schema.TokenCounts`."""

    raw: NonNegativeInt = 0
    """Prompt and completion tokens of all calls."""
    distinct: NonNegativeInt = 0
    """Distinct token prefixes within each episode, summed."""
    trained: NonNegativeInt = 0
    """Tokens that carried a loss."""


class EpisodesSummary(_Part):
    """How the training episodes ended."""

    ok: NonNegativeInt = 0
    """Episodes with a reward that were trained on."""
    failed: NonNegativeInt = 0
    """Episodes that raised, hung or were never scored."""
    dropped: NonNegativeInt = 0
    """Episodes with a reward, but without a trainable token."""


class RunSummary(_Part):
    """The whole of `summary.json`."""

    backbone: str
    """The backbone that ran."""
    seed: NonNegativeInt
    """trainer_common.seed."""
    steps: NonNegativeInt
    """Training steps done, those before a resume included."""
    seconds: NonNegativeFloat
    """From the start of the process to the end of the run."""
    validation: ValidationsSummary = ValidationsSummary()
    """Validation before and after training."""
    first_reward_seconds: NonNegativeFloat | None = None
    """From the start of the process to the first scored episode; None where there was none."""
    tokens: TokensSummary = TokensSummary()
    """Tokens of the training episodes."""
    episodes: EpisodesSummary = EpisodesSummary()
    """How the training episodes ended."""
    model: str | None = None
    """Folder of the tuned model; None where none was written."""


def write_summary(folder: Path, summary: RunSummary) -> Path:
    """Write `summary.json` into a run's folder and return its path.

    Raises:
        RecordError: it cannot be written.
    """
    path = folder / _FILE
    write_atomically(path, dump_json(to_plain(summary.model_dump(), current_redactor())) + b"\n")
    return path


def read_summary(folder: Path) -> RunSummary:
    """Read `summary.json` of a run's folder.

    Raises:
        RecordError: there is none, or it is no summary.
    """
    path = folder / _FILE
    try:
        return RunSummary.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}; did the run end?") from error
    except ValidationError as error:
        raise RecordError(f"{path} is no run summary: {error}") from error
