"""The rewards for an episode, its agents, and its LLM calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from astuner.errors import EpisodeError, JudgeError, UnscoredError, WorkflowError, shorten
from astuner.schema import AgentStep, Judgement, LlmCall

Reward = float | Mapping[str, float] | Sequence[float]
"""The reward of an episode, of its agents by name, or of its LLM calls in order."""


def mean_reward(reward: Reward) -> float:
    """Return an episode's reward: the mean of its agents' or calls' rewards."""
    if isinstance(reward, float):
        return reward
    values = list(reward.values()) if isinstance(reward, Mapping) else list(reward)
    return sum(values) / len(values)


def judged_reward(judgement: Judgement) -> Reward:
    """Return the reward of a checked judgement.

    Raises:
        UnscoredError: the judgement has no reward.
    """
    if judgement.reward is None:
        text = judgement.explanation or "the judge returned a Judgement without a reward"
        raise UnscoredError(text, judgement.unscored_cause)
    return judgement.agent_rewards or judgement.call_rewards or judgement.reward


def with_rewards(calls: Sequence[LlmCall], reward: Reward, *, judged: bool = False) -> tuple[LlmCall, ...]:
    """Return the calls with the rewards of their agents, or with their own rewards.

    Args:
        calls: the calls of an episode.
        reward: the reward for the episode, its agents, or its calls.
        judged: whether the reward comes from the judge, for messages.

    Raises:
        EpisodeError: a trained agent has no reward, or the number of rewards differs from the number of calls; a
            `JudgeError` if the judge computed the reward, else a `WorkflowError`.
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
            f"{name} is a list of {len(reward)} rewards, but the episode made {len(calls)} LLM calls: "
            f"return one reward per call, in the order of {order}"
        )
    return tuple(replace(call, reward=value) for call, value in zip(calls, reward, strict=True))


def with_steps(calls: Sequence[LlmCall], steps: Sequence[AgentStep | None]) -> tuple[LlmCall, ...]:
    """Return the calls with their steps, whose states are replaced by hashes.

    Args:
        calls: the calls of an episode.
        steps: the steps of the calls, as in `WorkflowOutput.steps`.

    Raises:
        WorkflowError: the number of steps differs from the number of calls.
    """
    if len(steps) != len(calls):
        raise WorkflowError(
            f"WorkflowOutput.steps is a list of {len(steps)} steps, but the episode made {len(calls)} LLM calls: "
            "return one step per call, in the order of model_tuner.calls, and None for a call without one"
        )
    return tuple(replace(call, step=_hashed(step)) for call, step in zip(calls, steps, strict=True))


def _hashed(step: AgentStep | None) -> AgentStep | None:
    if step is None:
        return None
    digest = hashlib.blake2b(step.state.encode(errors="surrogatepass"), digest_size=8)
    return replace(step, state=digest.hexdigest())
