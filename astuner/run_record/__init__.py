"""What a run leaves in `launcher_record/{experiment}/`: its writer, and readers for whoever shows it."""

from astuner.run_record.episode_file import RecordedEpisode, read_episode, read_recorded_episode, shared_ids
from astuner.run_record.episodes import EpisodeEntry, read_index
from astuner.run_record.folder import is_record
from astuner.run_record.following import Place, read_lines_after
from astuner.run_record.lock import FolderLock, is_being_written
from astuner.run_record.log_file import RedactingStream
from astuner.run_record.lookup import find_episode, find_run
from astuner.run_record.metrics import MetricsRow, read_metrics
from astuner.run_record.output import output_redacted, redact_output
from astuner.run_record.plots import plot_run
from astuner.run_record.record import RunRecord
from astuner.run_record.secrets import learn_secrets, redact, redact_argv, secret_variables
from astuner.run_record.sinks import LoggerName, check_loggers
from astuner.run_record.summary import (
    EpisodesSummary,
    RunSummary,
    TokensSummary,
    ValidationsSummary,
    ValidationSummary,
    read_summary,
    write_summary,
)
from astuner.run_record.updates import SampleUpdate, by_token, call_advantages, of_span, trained_tokens
from astuner.schema import Split

__all__ = [
    "EpisodeEntry",
    "EpisodesSummary",
    "FolderLock",
    "LoggerName",
    "MetricsRow",
    "Place",
    "RecordedEpisode",
    "RedactingStream",
    "RunRecord",
    "RunSummary",
    "SampleUpdate",
    "Split",
    "TokensSummary",
    "ValidationSummary",
    "ValidationsSummary",
    "by_token",
    "call_advantages",
    "check_loggers",
    "find_episode",
    "find_run",
    "is_being_written",
    "is_record",
    "learn_secrets",
    "of_span",
    "output_redacted",
    "plot_run",
    "read_episode",
    "read_index",
    "read_lines_after",
    "read_metrics",
    "read_recorded_episode",
    "read_summary",
    "redact",
    "redact_argv",
    "redact_output",
    "secret_variables",
    "shared_ids",
    "trained_tokens",
    "write_summary",
]
