"""Checks that compare rewards with reference answers, with crashes, and between equal conversations."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence

from astuner.config.algorithms import ALGORITHMS
from astuner.diagnostics.evidence import (
    Result,
    StepEvidence,
    answer_is_right,
    groups_of,
    is_number,
    reference,
    tokens_digest,
)
from astuner.errors import JudgeError, UnscoredError, shorten
from astuner.schema import Episode

_JUDGE_FIX = (
    "test the judge (task_judge.judge_protocol, or the reward that the workflow returns) on a right and a wrong "
    "answer: which field it compares, and in which direction"
)
# Probability of a false alarm in a step whose rewards do not depend on the answers.
_CHANCE = 1e-4
_ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Timeout|Interrupt)\b|Traceback \(most recent call last\)")
_ERROR_FIELDS = ("error", "exception", "traceback", "failure")


def judge_fails(step: StepEvidence) -> Result:
    """Find a judge that fails, or a workflow whose reward is not a finite number, for at least half of the episodes."""
    kinds = Counter(episode.error_kind for episode in step.episodes if episode.status == "failed")
    kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
    if count < 2 or count < len(step.episodes) / 2:
        return
    first = next(episode for episode in step.episodes if episode.error_kind == kind and episode.status == "failed")
    text = first.error or ""
    if "finite number" not in text and (kind or "").partition("/")[0] not in (JudgeError.kind, UnscoredError.kind):
        return
    fix = "correct the judge (task_judge.judge_protocol) or the data that it reads; these episodes are not trained"
    if "nan" in text.lower():
        fix = (
            "find the division by 0, the empty mean or the missing value in the judge (task_judge.judge_protocol) "
            "that makes the reward NaN; these episodes are not trained"
        )
    yield f"{count} of {len(step.episodes)} episodes have no reward, because the judge fails: {text[:300]}", fix


def _compared(step: StepEvidence, *, numbers_only: bool) -> tuple[list[Episode], list[Episode]]:
    """Return the scored episodes whose answer equals the reference, and those with a different answer."""
    right: list[Episode] = []
    wrong: list[Episode] = []
    for episode in step.scored:
        expected = reference(episode.task)
        if expected is None or (numbers_only and not is_number(expected)):
            continue
        verdict = answer_is_right(episode, expected)
        if verdict is not None:
            (right if verdict else wrong).append(episode)
    return right, wrong


def _rewards(episodes: Sequence[Episode]) -> list[float]:
    return [episode.reward for episode in episodes if episode.reward is not None]


def right_answers_not_rewarded(step: StepEvidence) -> Result:
    """Find a judge that gives its lowest reward to all episodes, including those with the reference answer."""
    rewards = _rewards(step.scored)
    if not rewards or min(rewards) != max(rewards) or any(episode.is_success for episode in step.scored):
        return
    right, _ = _compared(step, numbers_only=False)
    # One equal text may be a coincidence, for example a short number in a wrong place.
    if len(right) >= 3 and len({episode.task.task_id for episode in right}) >= 2:
        example = right[0]
        yield (
            f"all {len(rewards)} episodes have the reward {rewards[0]:g} and none is a success, but the answers of "
            f"{len(right)} of them equal the reference answer, for example {reference(example.task)!r} in "
            f"{shorten(example.episode_id)}: the judge gives the same reward to all",
            _JUDGE_FIX,
        )


def wrong_answers_rewarded(step: StepEvidence) -> Result:
    """Find a judge that accepts every answer."""
    rewards = _rewards(step.scored)
    if not rewards or min(rewards) != max(rewards) or not all(episode.is_success for episode in step.scored):
        return
    _, wrong = _compared(step, numbers_only=True)
    if len(wrong) >= 4 and len({episode.task.task_id for episode in wrong}) >= 2:
        example = wrong[0]
        yield (
            f"all {len(rewards)} episodes have the reward {rewards[0]:g} and are a success, but {len(wrong)} answers "
            f"do not contain the reference answer, for example {reference(example.task)!r} in "
            f"{shorten(example.episode_id)}: "
            "the judge accepts every answer",
            _JUDGE_FIX,
        )


def rewards_contradict_answers(step: StepEvidence) -> Result:
    """Find a judge that rewards wrong answers instead of right ones."""
    right, wrong = _compared(step, numbers_only=False)
    lowest = min(_rewards(step.scored), default=0.0)
    high_right = sum(reward > lowest for reward in _rewards(right))
    high_wrong = sum(reward > lowest for reward in _rewards(wrong))
    if len(right) < 3 or high_right or not high_wrong:
        return
    # Fisher's exact test: the probability that no right answer is among the high rewards, if they are given at random.
    chance = math.comb(len(wrong), high_wrong) / math.comb(len(right) + len(wrong), high_wrong)
    if chance < _CHANCE:
        yield (
            f"rewards are inverted: all {len(right)} episodes whose answer equals the reference answer have the lowest "
            f"reward, {lowest:g}, and {high_wrong} of {len(wrong)} episodes with another answer have a higher one",
            _JUDGE_FIX,
        )


def crashes_are_rewarded(step: StepEvidence) -> Result:
    """Find a workflow that catches its own exception and returns an output, which is then scored and trained."""
    crashed: list[tuple[Episode, str]] = []
    for episode in step.scored:
        for name, value in episode.metadata.items():
            is_named = any(word in str(name).lower() for word in _ERROR_FIELDS)
            is_error = isinstance(value, BaseException) or (
                isinstance(value, str) and is_named and _ERROR_NAME.search(value) is not None
            )
            if is_error:
                crashed.append((episode, f"{name}: {value}"))
                break
    if len(crashed) >= 2:
        example, text = crashed[0]
        yield (
            f"{len(crashed)} of {len(step.episodes)} episodes crashed but have a reward, for example "
            f"{example.reward:g} for {shorten(example.episode_id)}, whose metadata has {text[:160]!r}: the model is "
            "trained on a crash that it did not cause",
            "let the exception leave `execute`: the episode is then counted as failed and not trained "
            "(rollout.max_retries repeats it)",
        )


def judge_is_inconsistent(step: StepEvidence) -> Result:
    """Find a judge that scores the same conversation of the same task differently."""
    rewards = _rewards(step.scored)
    spread = max(rewards, default=0.0) - min(rewards, default=0.0)

    def answers(episode: Episode) -> Hashable:
        return episode.task.task_id, tuple(tokens_digest(call.completion_ids) for call in episode.calls)

    def prompts(episode: Episode) -> Hashable:
        return tuple(tokens_digest(call.prompt_ids) for call in episode.calls)

    episodes = [episode for episode in step.scored if episode.calls and not episode.agent_rewards]
    compared = [group for similar in groups_of(episodes, answers) for group in groups_of(similar, prompts)]
    # A judge that is a model, or measures time, varies a little; a random one varies as much as all rewards do.
    differ = [group for group in compared if max(_rewards(group)) - min(_rewards(group)) > spread / 2 > 0]
    if len(differ) >= 2 and len(differ) > len(compared) / 4:
        first, second = sorted(differ[0], key=lambda episode: episode.reward or 0.0)[:: len(differ[0]) - 1]
        yield (
            f"{len(differ)} of {len(compared)} conversations that occurred more than once, token for token, have "
            f"different rewards, for example {first.reward:g} for {shorten(first.episode_id)} and {second.reward:g} "
            f"for {shorten(second.episode_id)}: the reward does not depend on the answer alone",
            "remove the randomness or the shared state from the judge (task_judge.judge_protocol); if it is a model, "
            "set its temperature to 0",
        )


def one_reward_component(step: StepEvidence) -> Result:
    """Find gdpo, which compares the components of the reward separately, where there is at most one."""
    algorithm = step.start.config.trainer_common.algorithm
    judged = [episode.judgement.components for episode in step.scored if episode.judgement is not None]
    names = set(algorithm.component_weights) or {name for each in judged for name in each if "." not in name}
    reinforcement = ALGORITHMS[algorithm.adv_estimator].reinforcement
    compares_components = reinforcement is not None and reinforcement.advantage.by_component
    if compares_components and step.scored and len(names) < 2:
        yield (
            f"{algorithm.adv_estimator} compares each component of the reward separately, and the rewards of this step "
            f"have {'only ' + next(iter(names)) if names else 'no component'}: the advantages are those of grpo, "
            "divided by their standard deviation in the step",
            "return the `components` of the reward from the judge (task_judge.judge_protocol, for example "
            "astuner.task_judge.composed_judges->WeightedJudge), or write trainer_common.algorithm.adv_estimator: grpo",
        )
