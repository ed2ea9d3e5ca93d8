"""The tables of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from astuner.run_record.findings import Severity

Stage = Literal["start", "rollout", "update"]


@dataclass(frozen=True)
class Check:
    """A check for one fault.

    Attributes:
        name: its name in the record.
        stage: when it runs: at the start of a run, after the rollout of a step, or after its update.
        severity: `error` if the fault prevents or distorts learning; `warning` if it makes results misleading.
        find: yields (what is wrong, how to fix it) from the evidence of its stage.
    """

    name: str
    stage: Stage
    severity: Severity
    find: Callable[[Any], Iterator[tuple[str, str]]]


def _checks(stage: Stage, **functions: Callable[[Any], Iterator[tuple[str, str]]]) -> Iterator[Check]:
    for name, function in functions.items():
        severity: Severity = "warning" if name in _WARNINGS else "error"
        yield Check(name, stage, severity, function)


_WARNINGS = {
    "validation_in_training",
    "duplicate_tasks",
    "reward_column_is_text",
    "tools_without_parser",
    "retokenised_by_client",
    "system_prompt_changed",
    "judge_is_inconsistent",
    "one_reward_component",
    "sampler_mismatch",
}


@cache
def checks_of(stage: Stage) -> tuple[Check, ...]:
    """Return the checks of a stage, and import them: a dry run has no update."""
    return tuple({"start": _start_checks, "rollout": _rollout_checks, "update": _update_checks}[stage]())


def all_checks() -> tuple[Check, ...]:
    """Return all checks."""
    return tuple(check for stage in get_args(Stage) for check in checks_of(stage))


def _start_checks() -> Iterator[Check]:
    from astuner.diagnostics import start_checks

    return _checks(
        "start",
        validation_in_training=start_checks.validation_in_training,
        duplicate_tasks=start_checks.duplicate_tasks,
        missing_references=start_checks.missing_references,
        reward_column_is_text=start_checks.reward_column_is_text,
        vocabulary_mismatch=start_checks.vocabulary_mismatch,
        end_token_mismatch=start_checks.end_token_mismatch,
        wrong_chat_template=start_checks.wrong_chat_template,
        doubled_bos=start_checks.doubled_bos,
        greedy_training=start_checks.greedy_training,
        learning_rate=start_checks.learning_rate,
    )


def _rollout_checks() -> Iterator[Check]:
    from astuner.diagnostics import answer_checks, prompt_checks, reward_checks

    return _checks(
        "rollout",
        doubled_bos_in_prompts=prompt_checks.doubled_bos_in_prompts,
        tools_not_in_prompt=prompt_checks.tools_not_in_prompt,
        tools_without_parser=prompt_checks.tools_without_parser,
        message_not_in_prompt=prompt_checks.message_not_in_prompt,
        same_prompt_for_all_tasks=prompt_checks.same_prompt_for_all_tasks,
        answer_in_prompt=prompt_checks.answer_in_prompt,
        retokenised_by_client=prompt_checks.retokenised_by_client,
        system_prompt_changed=prompt_checks.system_prompt_changed,
        observations_never_change=prompt_checks.observations_never_change,
        tool_always_fails=prompt_checks.tool_always_fails,
        same_tasks_again=prompt_checks.same_tasks_again,
        every_answer_truncated=answer_checks.every_answer_truncated,
        every_episode_left_out=answer_checks.every_episode_left_out,
        identical_samples=answer_checks.identical_samples,
        answers_of_other_prompts=answer_checks.answers_of_other_prompts,
        tool_calls_not_parsed=answer_checks.tool_calls_not_parsed,
        mask_differs_from_calls=answer_checks.mask_differs_from_calls,
        old_weights=answer_checks.old_weights,
        judge_fails=reward_checks.judge_fails,
        right_answers_not_rewarded=reward_checks.right_answers_not_rewarded,
        wrong_answers_rewarded=reward_checks.wrong_answers_rewarded,
        rewards_contradict_answers=reward_checks.rewards_contradict_answers,
        crashes_are_rewarded=reward_checks.crashes_are_rewarded,
        judge_is_inconsistent=reward_checks.judge_is_inconsistent,
        one_reward_component=reward_checks.one_reward_component,
    )


def _update_checks() -> Iterator[Check]:
    from astuner.diagnostics import update_checks

    return _checks(
        "update",
        learning_rate_is_zero=update_checks.learning_rate_is_zero,
        no_gradient=update_checks.no_gradient,
        weights_unchanged=update_checks.weights_unchanged,
        advantages_contradict_rewards=update_checks.advantages_contradict_rewards,
        mask_off_by_one=update_checks.mask_off_by_one,
        logprob_gap=update_checks.logprob_gap,
        sampler_mismatch=update_checks.sampler_mismatch,
    )
