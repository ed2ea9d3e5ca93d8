"""Rewards and training samples of episodes, and episodes that are judged together with others for their task."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from astuner.context_tracker.audit import certificate, describe_masks
from astuner.context_tracker.merge import MergeMode, build_samples, limit_samples
from astuner.debugging.tracebacks import format_error
from astuner.errors import CallLimitError, EpisodeError, JudgeError, UnscoredError, WorkflowError, message_of, shorten
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import AgentStep, Episode, Judgement, LlmCall, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseGroupJudge
from astuner.task_judge.scoring import score_group

Reward = float | Mapping[str, float] | Sequence[float]
"""An episode's reward, its agents' rewards by name, or its LLM calls' rewards in order."""


def mean_reward(reward: Reward) -> float:
    """Return an episode's reward: the mean of its agents' or calls' rewards."""
    if isinstance(reward, float):
        return reward
    values = list(reward.values()) if isinstance(reward, Mapping) else list(reward)
    return sum(values) / len(values)


def judged_reward(judgement: Judgement) -> Reward:
    """Return the reward of a checked judgement; raise UnscoredError if it has none."""
    if judgement.reward is None:
        text = judgement.explanation or "the judge returned a Judgement without a reward"
        raise UnscoredError(text, judgement.unscored_cause)
    return judgement.agent_rewards or judgement.call_rewards or judgement.reward


def with_rewards(calls: Sequence[LlmCall], reward: Reward, *, judged: bool = False) -> tuple[LlmCall, ...]:
    """Return the calls with the rewards of their agents, or with their own rewards.

    Args:
        reward: the reward for the episode, its agents, or its calls.
        judged: whether the reward comes from the judge, for messages.

    Raises:
        EpisodeError: a trained agent has no reward, or there is not one reward per call; a `JudgeError` if the judge
            computed the reward, else a `WorkflowError`.
    """
    if isinstance(reward, float):
        return tuple(calls)
    error: type[EpisodeError] = JudgeError if judged else WorkflowError
    if isinstance(reward, Mapping):
        agents = {call.agent_name for call in calls if call.trained}
        if missing := sorted(agents - reward.keys()):
            raise error(
                f"{'the judge' if judged else 'WorkflowOutput.reward'} rewards "
                f"{shorten(', '.join(map(repr, sorted(reward))))}, but "
                f"{shorten(', '.join(map(repr, missing)))} made LLM calls that are trained: reward every "
                "trained agent under the name that model_tuner.for_agent(name) gave it"
            )
        return tuple(replace(call, reward=reward[call.agent_name]) if call.trained else call for call in calls)
    if len(reward) != len(calls):
        name, order = (
            ("Judgement.call_rewards", "workflow_output.calls")
            if judged
            else ("WorkflowOutput.reward", "model_tuner.calls")
        )
        raise error(
            f"{name} has {len(reward)} rewards, but the episode made {len(calls)} LLM calls: "
            f"return one reward per call, in the order of {order}"
        )
    return tuple(replace(call, reward=value) for call, value in zip(calls, reward, strict=True))


def with_steps(calls: Sequence[LlmCall], steps: Sequence[AgentStep | None]) -> tuple[LlmCall, ...]:
    """Return the calls with their steps, whose states are replaced by hashes; WorkflowError: their numbers differ."""
    if len(steps) != len(calls):
        raise WorkflowError(
            f"WorkflowOutput.steps has {len(steps)} steps, but the episode made {len(calls)} LLM calls: "
            "return one step per call, in the order of model_tuner.calls, and None for a call without one"
        )
    return tuple(replace(call, step=_hashed(step)) for call, step in zip(calls, steps, strict=True))


def _hashed(step: AgentStep | None) -> AgentStep | None:
    if step is None:
        return None
    digest = hashlib.blake2b(step.state.encode(errors="surrogatepass"), digest_size=8)
    return replace(step, state=digest.hexdigest())


def with_samples(episode: Episode, *, max_samples: int, merge: MergeMode, seed: int) -> Episode:
    """Return a scored episode with its samples.

    It is dropped if it has no tokens to train on. It fails if the samples do not rebuild each of their calls exactly.

    Args:
        episode: the episode; one that is not `ok` is returned as it is.
        merge: how calls become samples.
        seed: decides which samples are kept.
    """
    if episode.status != "ok":
        return episode
    samples, dropped = limit_samples(build_samples(episode.calls), max_samples, seed)
    kept = {span.call_id for sample in samples for span in sample.spans}
    calls = [call for call in episode.calls if not dropped or call.call_id in kept]
    if merge != "leaf":
        # Use the calls of the same samples, so that the merge mode does not change what is trained.
        samples = build_samples([call for call in episode.calls if call.call_id in kept], merge)
    if (share := certificate(calls, samples)) < 1.0:
        masks = describe_masks(calls, samples) or "their prompts, logprobs or positions differ"
        error = f"the samples rebuild only {share:.0%} of the calls exactly: {masks}. They are not trained"
        episode = replace(episode, reward=None, is_success=None, agent_rewards={}, judgement=None)
        return replace(episode, status="failed", error_kind="inexact", error=error)
    if samples:
        return replace(episode, samples=tuple(samples), dropped_samples=dropped)
    error = "the workflow made no LLM call that returned a token, so there is nothing to train on"
    if episode.calls and not any(call.trained for call in episode.calls):
        targets = ", ".join(sorted({call.target_tag for call in episode.calls}))
        error = (
            "no LLM call of the episode has a target in rollout.trainable_targets, so there is nothing to train "
            f"on; the targets of its calls are: {targets}"
        )
    return replace(episode, status="dropped", error_kind="no_tokens", error=error)


UNJUDGED = "it was not judged with the other episodes of its task"
_CUT = "cut: "


def cut_text(limit_error: CallLimitError | None) -> str | None:
    """Return the note about an episode that was cut; None if it was not."""
    return None if limit_error is None else f"{_CUT}{limit_error}"


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
        episodes: the episodes that wait for their group.
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
