"""The files of a run in `launcher_record/{experiment}/`: their writer and their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.doors import lazy_names

if TYPE_CHECKING:
    from astuner.run_record.episode_file import read_episode, read_recorded_episode
    from astuner.run_record.episodes import read_index
    from astuner.run_record.findings import read_findings
    from astuner.run_record.metrics import read_metrics
    from astuner.run_record.rescores import find_rescores, read_rescored_episodes
    from astuner.run_record.summary import read_summary
    from astuner.run_record.updates import by_token, entropy_by_token

__all__ = [
    "by_token",
    "entropy_by_token",
    "find_rescores",
    "read_episode",
    "read_findings",
    "read_index",
    "read_metrics",
    "read_recorded_episode",
    "read_rescored_episodes",
    "read_summary",
]

# A run writes its record, and only other commands read it.
__getattr__ = lazy_names(
    __name__,
    {
        "by_token": "astuner.run_record.updates",
        "entropy_by_token": "astuner.run_record.updates",
        "find_rescores": "astuner.run_record.rescores",
        "read_episode": "astuner.run_record.episode_file",
        "read_findings": "astuner.run_record.findings",
        "read_index": "astuner.run_record.episodes",
        "read_metrics": "astuner.run_record.metrics",
        "read_recorded_episode": "astuner.run_record.episode_file",
        "read_rescored_episodes": "astuner.run_record.rescores",
        "read_summary": "astuner.run_record.summary",
    },
)
