"""The files of a run in `launcher_record/{experiment}/`: their writer and their readers."""

from astuner.run_record.console_lines import FILE_ONLY, spark_line
from astuner.run_record.episode_file import RecordedEpisode, common_prefix_len, read_episode, read_recorded_episode
from astuner.run_record.episodes import NO_ADVANTAGE, EpisodeEntry, read_index
from astuner.run_record.files import ReadPosition, read_new_lines
from astuner.run_record.findings import (
    FindingSummary,
    RunFinding,
    Severity,
    read_findings,
    summarise_findings,
)
from astuner.run_record.folder import FolderLock, current_environment, is_being_written, is_record
from astuner.run_record.intervals import difference_interval, mean_interval, success_interval
from astuner.run_record.loggers import LoggerName, check_loggers
from astuner.run_record.lookup import find_episode, find_run
from astuner.run_record.metrics import MetricsRow, read_metrics
from astuner.run_record.plots import plot_run
from astuner.run_record.record import RunRecord
from astuner.run_record.rescores import (
    Rescore,
    RescoredEpisode,
    find_rescores,
    read_rescore,
    read_rescored_episodes,
)
from astuner.run_record.run_facts import (
    RunFacts,
    RunNote,
    config_difference,
    config_of,
    environment_of,
    environments_of,
    read_facts,
    read_note,
    run_state,
    search_folders_of,
    summary_of,
    write_note,
)
from astuner.run_record.run_results import describe_result, describe_run, result_difference, setting_differences
from astuner.run_record.step_writer import FinishedStep, StepWriter
from astuner.run_record.summary import (
    EpisodesSummary,
    RunSummary,
    TokensSummary,
    ValidationsSummary,
    ValidationSummary,
    read_summary,
    write_summary,
)
from astuner.run_record.updates import (
    SampleUpdate,
    by_token,
    call_advantages,
    count_trained_tokens,
    entropy_by_token,
    span_values,
)
from astuner.run_record.verdict import RunVerdict, run_verdict
from astuner.schema import Split

__all__ = [
    "FILE_ONLY",
    "NO_ADVANTAGE",
    "EpisodeEntry",
    "EpisodesSummary",
    "FindingSummary",
    "FinishedStep",
    "FolderLock",
    "LoggerName",
    "MetricsRow",
    "ReadPosition",
    "RecordedEpisode",
    "Rescore",
    "RescoredEpisode",
    "RunFacts",
    "RunFinding",
    "RunNote",
    "RunRecord",
    "RunSummary",
    "RunVerdict",
    "SampleUpdate",
    "Severity",
    "Split",
    "StepWriter",
    "TokensSummary",
    "ValidationSummary",
    "ValidationsSummary",
    "by_token",
    "call_advantages",
    "check_loggers",
    "common_prefix_len",
    "config_difference",
    "config_of",
    "count_trained_tokens",
    "current_environment",
    "describe_result",
    "describe_run",
    "difference_interval",
    "entropy_by_token",
    "environment_of",
    "environments_of",
    "find_episode",
    "find_rescores",
    "find_run",
    "is_being_written",
    "is_record",
    "mean_interval",
    "plot_run",
    "read_episode",
    "read_facts",
    "read_findings",
    "read_index",
    "read_metrics",
    "read_new_lines",
    "read_note",
    "read_recorded_episode",
    "read_rescore",
    "read_rescored_episodes",
    "read_summary",
    "result_difference",
    "run_state",
    "run_verdict",
    "search_folders_of",
    "setting_differences",
    "span_values",
    "spark_line",
    "success_interval",
    "summarise_findings",
    "summary_of",
    "write_note",
    "write_summary",
]
