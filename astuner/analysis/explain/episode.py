"""Explanation of an episode: its calls, the calls that they extend, and the samples that train them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from astuner.analysis.explain.run import token_saving
from astuner.context_tracker.audit import certificate, count_tokens
from astuner.context_tracker.packing import encode_ids, shared_prefix_length
from astuner.diagnostics.prompt_checks import fix_for, fixes_for
from astuner.run_record.episode_file import RecordedEpisode
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.updates import call_advantages
from astuner.schema import Anomaly, Judgement


@dataclass(frozen=True)
class ForkExplanation:
    """A fork, as in `astuner.schema.Fork`. `call` is the number of the earlier call; None if it is not recorded."""

    cause: str
    call: int | None
    call_id: str
    position: int
    message_index: int
    expected: str
    found: str
    fix: str


@dataclass(frozen=True)
class CallExplanation:
    """A call.

    Attributes:
        call: Number of the call, from 1, in the order in which calls ended.
        call_id, agent_name, target_tag, trained, reward, finish_reason, policy_version: As in `astuner.schema.LlmCall`.
        prompt_tokens, completion_tokens: Lengths; None if token ids are withheld.
        seconds: Duration of the call.
        extends: Number of the longest earlier call whose prompt and completion start this call's prompt.
        shared_tokens: Length of the longest prefix that the prompt shares with an earlier call; None if withheld.
        fork: Why the call does not extend the call that it should extend.
        timeline: Number of the sample that trains the call, or None.
        advantage: Mean advantage of the call's tokens; None if it is not recorded.
    """

    call: int
    call_id: str
    agent_name: str
    target_tag: str
    trained: bool
    reward: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str
    policy_version: int
    seconds: float
    extends: int | None
    shared_tokens: int | None
    fork: ForkExplanation | None
    timeline: int | None
    advantage: float | None


@dataclass(frozen=True)
class SpanExplanation:
    """Position of a call's completion in a timeline: tokens `start` to `end` (exclusive)."""

    call: int | None
    call_id: str
    start: int
    end: int


@dataclass(frozen=True)
class TimelineExplanation:
    """A sample with its numbers of tokens and trained tokens. `weight` is its share of the episode."""

    timeline: int
    tokens: int
    trained: int
    weight: float
    calls: tuple[SpanExplanation, ...]


@dataclass(frozen=True)
class EpisodeExplanation:
    """Output of `astuner explain RUN EPISODE`.

    Attributes:
        step … seconds: As in the index of the record.
        agent_rewards: Rewards by agent, if the workflow rewards agents; `reward` and `advantage` are of their mean.
        error: The error message.
        judgement: The result of the judge; None if no judge scored the episode.
        error_traceback, process_effects, ended_processes, anomaly: As in `astuner.schema.Episode`.
        calls, timelines: In order; there are no timelines if token ids are withheld.
        certificate: Share of the calls that the samples rebuild exactly; None if it cannot be checked.
        certificate_note: Why the certificate is None, or less than 1 by intent.
        withheld: Why token ids and samples are not in the record; None if they are.
        fixes: Suggestions by cause of fork.
        lacks_advantage: Whether it is a training episode with a reward but without an advantage.
    """

    run: str
    episode_id: str
    task_id: str
    step: int
    split: str
    repeat_index: int
    status: str
    reward: float | None
    agent_rewards: Mapping[str, float]
    is_success: bool | None
    advantage: float | None
    seconds: float
    error_kind: str | None
    error: str | None
    calls: tuple[CallExplanation, ...]
    timelines: tuple[TimelineExplanation, ...]
    dropped_samples: int
    tokens_raw: int
    tokens_distinct: int | None
    tokens_trained: int
    saving: float | None
    certificate: float | None
    certificate_note: str | None
    withheld: str | None
    fixes: Mapping[str, str]
    lacks_advantage: bool = False
    error_traceback: str | None = None
    process_effects: tuple[str, ...] = ()
    ended_processes: tuple[str, ...] = ()
    judgement: Judgement | None = None
    anomaly: Anomaly | None = None


def explain_episode(run: str, entry: EpisodeEntry, recorded: RecordedEpisode) -> EpisodeExplanation:
    """Return the explanation of an episode from its entry in the index and its file."""
    episode = recorded.episode
    # Withheld tokens cannot be counted here.
    distinct = entry.tokens_distinct
    if distinct is None and not recorded.withheld:
        distinct = count_tokens(episode.calls).distinct
    share, note = _certificate(recorded)
    return EpisodeExplanation(
        run=run,
        episode_id=episode.episode_id,
        task_id=episode.task.task_id,
        step=entry.step,
        split=entry.split,
        repeat_index=episode.repeat_index,
        status=episode.status,
        reward=episode.reward,
        agent_rewards=episode.agent_rewards,
        is_success=episode.is_success,
        advantage=entry.advantage,
        lacks_advantage=entry.lacks_advantage,
        seconds=entry.seconds,
        error_kind=episode.error_kind,
        error=episode.error,
        error_traceback=episode.error_traceback,
        process_effects=episode.process_effects,
        ended_processes=episode.ended_processes,
        judgement=episode.judgement,
        anomaly=episode.anomaly,
        calls=_calls(recorded),
        timelines=_timelines(recorded),
        dropped_samples=episode.dropped_samples,
        tokens_raw=entry.tokens_raw,
        tokens_distinct=distinct,
        tokens_trained=entry.tokens_trained,
        saving=token_saving(entry.tokens_raw, distinct),
        certificate=share,
        certificate_note=note,
        withheld=recorded.withheld,
        fixes=fixes_for(call.fork.cause for call in episode.calls if call.fork is not None),
    )


def _certificate(recorded: RecordedEpisode) -> tuple[float | None, str | None]:
    episode = recorded.episode
    if recorded.withheld:
        return None, "cannot be checked: the token ids are not in the record, as they spell a secret"
    if episode.status != "ok":
        return None, f"nothing to check: the episode has status {episode.status!r} and is not trained"
    share = certificate(episode.calls, episode.samples)
    if episode.dropped_samples:
        return share, f"{episode.dropped_samples} samples beyond rollout.multi_turn.max_sample_per_task were dropped"
    return share, None


def _calls(recorded: RecordedEpisode) -> tuple[CallExplanation, ...]:
    episode, withheld = recorded.episode, recorded.withheld is not None
    numbers = {call.call_id: number for number, call in enumerate(episode.calls, start=1)}
    timelines = {span.call_id: number for number, sample in enumerate(episode.samples, 1) for span in sample.spans}
    advantages = call_advantages(episode.samples, recorded.updates)
    streams: list[bytes] = []
    calls = []
    for number, call in enumerate(episode.calls, start=1):
        prompt = encode_ids(call.prompt_ids)
        # Calls that another model answered have no tokens.
        extended = [(len(s), index) for index, s in enumerate(streams, start=1) if s and prompt.startswith(s)]
        fork = None
        if call.fork is not None:
            fork = ForkExplanation(
                cause=call.fork.cause,
                call=numbers.get(call.fork.call_id),
                call_id=call.fork.call_id,
                position=call.fork.position,
                message_index=call.fork.message_index,
                expected=call.fork.expected,
                found=call.fork.found,
                fix=fix_for(call.fork.cause),
            )
        calls.append(
            CallExplanation(
                call=number,
                call_id=call.call_id,
                agent_name=call.agent_name,
                target_tag=call.target_tag,
                trained=call.trained,
                reward=call.reward,
                prompt_tokens=None if withheld else len(call.prompt_ids),
                completion_tokens=None if withheld else len(call.completion_ids),
                finish_reason=call.finish_reason,
                policy_version=call.policy_version,
                seconds=call.end_time - call.start_time,
                extends=None if withheld or not extended else max(extended)[1],
                shared_tokens=None if withheld else max((shared_prefix_length(prompt, s) for s in streams), default=0),
                fork=fork,
                timeline=timelines.get(call.call_id),
                advantage=advantages.get(call.call_id),
            )
        )
        streams.append(prompt + encode_ids(call.completion_ids))
    return tuple(calls)


def _timelines(recorded: RecordedEpisode) -> tuple[TimelineExplanation, ...]:
    numbers = {call.call_id: number for number, call in enumerate(recorded.episode.calls, start=1)}
    return tuple(
        TimelineExplanation(
            timeline=number,
            tokens=len(sample.token_ids),
            trained=sum(sample.train_counts),
            weight=sample.weight,
            calls=tuple(
                SpanExplanation(numbers.get(span.call_id), span.call_id, span.start, span.end) for span in sample.spans
            ),
        )
        for number, sample in enumerate(recorded.episode.samples, start=1)
    )
