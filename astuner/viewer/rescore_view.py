"""JSON content for a rescored run's page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.run_record.rescores import RescoredEpisode, find_rescores, read_rescored_episodes
from astuner.viewer.index import key_of, shorten

_MAX_EPISODES = 300


def rescore_list(folder: Path) -> list[dict[str, Any]]:
    """Return the rescored versions of the run in `folder`, for the run's page."""
    return [
        {
            "name": name, "judge": shorten(rescore.judge), "episodes": rescore.episodes, "changed": rescore.changed,
            "sign_flips": rescore.sign_flips, "kendall_tau": rescore.kendall_tau,
            "diverges": rescore.audit is not None and rescore.audit.diverges,
        }
        for name, rescore in find_rescores(folder).items()
    ]  # fmt: skip


def rescore_view(folder: Path, name: str) -> dict[str, Any]:
    """Return a rescored version of the run in `folder`, with the episodes whose rewards differ.

    Raises:
        RecordError: If the run has no such version, or its files cannot be read.
    """
    rescores = find_rescores(folder)
    if name not in rescores:
        raise RecordError(f"the run has no result of astuner rescore named {name[:80]!r}; there are {len(rescores)}")
    content = asdict(rescores[name])
    for row in (content["audit"] or {}).get("disagreements", ()):
        row["key"] = key_of(row["episode_id"])
    changed = [row for row in read_rescored_episodes(folder.absolute().parent / name) if row.is_changed]
    changed.sort(key=lambda row: (not row.flips_sign, -abs((row.reward or 0.0) - (row.reward_before or 0.0))))
    shown = [_episode(row) for row in changed[:_MAX_EPISODES]]
    return {**content, "name": name, "changed_episodes": shown, "changed_total": len(changed)}


def _episode(row: RescoredEpisode) -> dict[str, Any]:
    explanation = row.error or (row.judgement.explanation if row.judgement else "")
    return {
        "key": key_of(row.episode_id), "episode": shorten(row.episode_id), "step": row.step,
        "reward_before": row.reward_before, "reward": row.reward, "advantage_before": row.advantage_before,
        "advantage": row.advantage, "flips_sign": row.flips_sign, "explanation": shorten(explanation),
    }  # fmt: skip
