"""Episodes that are judged together with the other episodes of their task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from astuner.context_tracker import MergeMode
from astuner.debugging.tracebacks import format_error
from astuner.errors import CallLimitError, EpisodeError, UnjudgedError, message_of
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Episode, Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseGroupJudge
from astuner.task_judge.scoring import score_group
from astuner.task_runner.rewards import judged_reward, mean_reward, with_rewards
from astuner.task_runner.samples import with_samples

UNJUDGED = "it was not judged with the other episodes of its task"
_CUT = "cut: "


def cut_text(limit_error: CallLimitError | None) -> str | None:
    """Return the note about an episode that was cut; None if it was not."""
    return None if limit_error is None else f"{_CUT}{limit_error}"


def is_unjudged(episode: Episode) -> bool:
    """Return whether an episode waits for the other episodes of its task, to be judged with them."""
    return episode.status == "failed" and episode.error_kind == UnjudgedError.kind


async def judge_group(
    judge: BaseGroupJudge,
    workflow_task: WorkflowTask,
    episodes: Sequence[Episode],
    seeds: Sequence[int],
    *,
    timeout: float | None,
    max_samples: int,
    merge: MergeMode,
    inline: bool,
) -> list[Episode]:
    """Return the episodes of a task with their rewards. Errors of the judge make them `failed`.

    Args:
        judge: the judge.
        workflow_task: the task of the episodes.
        episodes: the episodes that wait for their group (`is_unjudged`).
        seeds: the seed of each episode.
        timeout: time limit of the judge, in seconds; None for no limit.
        max_samples, merge: as in `with_samples`.
        inline: as in `score_group`.
    """
    outputs = [WorkflowOutput(metadata=dict(episode.metadata), calls=episode.calls) for episode in episodes]
    try:
        results: Sequence[Judgement | EpisodeError] = await score_group(
            judge, workflow_task, outputs, timeout, inline=inline
        )
    except EpisodeError as error:
        results = [error] * len(episodes)
    judged = [_judged(episode, result) for episode, result in zip(episodes, results, strict=True)]
    return [
        with_samples(episode, max_samples=max_samples, merge=merge, seed=seed)
        for episode, seed in zip(judged, seeds, strict=True)
    ]


def _judged(episode: Episode, result: Judgement | EpisodeError) -> Episode:
    """Return an episode of a group with its reward, or as failed."""
    try:
        if isinstance(result, EpisodeError):
            raise result
        metadata = to_jsonable(result.metadata, lambda text: text)
        result = replace(result, metadata=metadata if isinstance(metadata, dict) else {})
        episode = replace(episode, judgement=result)
        reward = judged_reward(result)
        cut = episode.error if episode.error and episode.error.startswith(_CUT) else None
        return replace(
            episode,
            status="ok",
            error_kind=CallLimitError.kind if cut else None,
            error=cut,
            calls=with_rewards(episode.calls, reward, judged=True),
            reward=mean_reward(reward),
            agent_rewards=reward if isinstance(reward, Mapping) else {},
            is_success=result.is_success,
        )
    except EpisodeError as error:
        text = message_of(error)
        return replace(episode, error_kind=str(error.kind), error=text, error_traceback=format_error(error))
