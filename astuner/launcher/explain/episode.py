"""The account of an episode: its calls, what each goes on from, and the samples that they became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astuner.context_tracker import certificate, count_tokens, encode_ids, shared_prefix_length
from astuner.launcher.explain.account import saving
from astuner.launcher.explain.advice import fix_for, fixes_for
from astuner.run_record import EpisodeEntry, RecordedEpisode, call_advantages
from astuner.schema import Fork, LlmCall, Sample


@dataclass(frozen=True)
class ExplainedFork:
    """A fork, as in `astuner.schema.Fork`; `call` is the earlier call's number, None where the record lacks it."""

    cause: str
    call: int | None
    call_id: str
    position: int
    message_index: int
    expected: str
    found: str
    fix: str


@dataclass(frozen=True)
class ExplainedCall:
    """A call.

    Attributes:
        call: its number, from 1, in the order in which calls ended.
        call_id, agent_name, target_tag, trained, reward, finish_reason, policy_version: as in `astuner.schema.LlmCall`.
        prompt_tokens, completion_tokens: None where token ids are withheld.
        seconds: how long it took.
        extends: number of the earlier call whose prompt and completion its prompt begins with; the longest of them.
        shared_tokens: how many tokens its prompt begins with that an earlier call had too; None where withheld.
        fork: why it does not extend a call that it should have extended.
        timeline: number of the sample that trains it; None where none does.
        advantage: what its tokens were trained with, their mean where they differ; None where the record lacks it.
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
    fork: ExplainedFork | None
    timeline: int | None
    advantage: float | None


@dataclass(frozen=True)
class ExplainedSpan:
    """A call's place in a timeline: its completion is tokens `start` to `end` (exclusive)."""

    call: int | None
    call_id: str
    start: int
    end: int


@dataclass(frozen=True)
class ExplainedTimeline:
    """A sample: `tokens` long, of which `trained` carry a loss; `weight` is its share of the episode."""

    timeline: int
    tokens: int
    trained: int
    weight: float
    calls: tuple[ExplainedSpan, ...]


@dataclass(frozen=True)
class EpisodeExplanation:
    """What `astuner explain RUN EPISODE` says.

    Attributes:
        step … seconds: as in the index of the record.
        agent_rewards: by agent, where the workflow rewarded agents; `reward` and `advantage` are then of their mean.
        error: what went wrong, in words.
        calls, timelines: in order; timelines are not known where token ids are withheld.
        certificate: share of the calls that the samples rebuild exactly; None where that cannot be checked.
        certificate_note: why it is None, or less than 1 by intent.
        withheld: why token ids and samples are not in the record; None where they are.
        fixes: what to try, by cause of fork.
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
    calls: tuple[ExplainedCall, ...]
    timelines: tuple[ExplainedTimeline, ...]
    dropped_samples: int
    tokens_raw: int
    tokens_distinct: int | None
    tokens_trained: int
    saving: float | None
    certificate: float | None
    certificate_note: str | None
    withheld: str | None
    fixes: Mapping[str, str]


def explain_episode(run: str, entry: EpisodeEntry, recorded: RecordedEpisode) -> EpisodeExplanation:
    """Account for an episode, given its line of the index and its file."""
    episode = recorded.episode
    # What is withheld was counted before.
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
        seconds=entry.seconds,
        error_kind=episode.error_kind,
        error=episode.error,
        calls=_calls(recorded),
        timelines=_timelines(episode.samples, _numbers(episode.calls)),
        dropped_samples=episode.dropped_samples,
        tokens_raw=entry.tokens_raw,
        tokens_distinct=distinct,
        tokens_trained=entry.tokens_trained,
        saving=saving(entry.tokens_raw, distinct),
        certificate=share,
        certificate_note=note,
        withheld=recorded.withheld,
        fixes=fixes_for(call.fork.cause for call in episode.calls if call.fork is not None),
    )


def _certificate(recorded: RecordedEpisode) -> tuple[float | None, str | None]:
    episode = recorded.episode
    if recorded.withheld:
        return None, "cannot be checked: the record leaves out token ids, as they spell a secret"
    if episode.status != "ok":
        return None, f"nothing to check: the episode {episode.status}, so nothing of it is trained"
    share = certificate(episode.calls, episode.samples)
    if episode.dropped_samples:
        return share, f"{episode.dropped_samples} samples beyond rollout.multi_turn.max_sample_per_task were left out"
    return share, None


def _numbers(calls: Sequence[LlmCall]) -> dict[str, int]:
    return {call.call_id: number for number, call in enumerate(calls, start=1)}


def _calls(recorded: RecordedEpisode) -> tuple[ExplainedCall, ...]:
    calls = recorded.episode.calls
    numbers = _numbers(calls)
    timelines = {
        span.call_id: number for number, sample in enumerate(recorded.episode.samples, start=1) for span in sample.spans
    }
    advantages = call_advantages(recorded.episode.samples, recorded.updates)
    streams: list[bytes] = []
    explained = []
    for number, call in enumerate(calls, start=1):
        prompt = encode_ids(call.prompt_ids)
        withheld = recorded.withheld is not None
        explained.append(
            ExplainedCall(
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
                extends=None if withheld else _extended(prompt, streams),
                shared_tokens=None if withheld else max((shared_prefix_length(prompt, s) for s in streams), default=0),
                fork=None if call.fork is None else _fork(call.fork, numbers),
                timeline=timelines.get(call.call_id),
                advantage=advantages.get(call.call_id),
            )
        )
        streams.append(prompt + encode_ids(call.completion_ids))
    return tuple(explained)


def _extended(prompt: bytes, streams: Sequence[bytes]) -> int | None:
    """Return the number of the call whose tokens are the longest beginning of `prompt`, the latest among equals."""
    # A call that another model answered has no tokens of its own.
    told = [(number, stream) for number, stream in enumerate(streams, start=1) if stream]
    found = [(len(stream), number) for number, stream in told if prompt.startswith(stream)]
    return max(found)[1] if found else None


def _fork(fork: Fork, numbers: Mapping[str, int]) -> ExplainedFork:
    return ExplainedFork(
        cause=fork.cause,
        call=numbers.get(fork.call_id),
        call_id=fork.call_id,
        position=fork.position,
        message_index=fork.message_index,
        expected=fork.expected,
        found=fork.found,
        fix=fix_for(fork.cause),
    )


def _timelines(samples: Sequence[Sample], numbers: Mapping[str, int]) -> tuple[ExplainedTimeline, ...]:
    return tuple(
        ExplainedTimeline(
            timeline=number,
            tokens=len(sample.token_ids),
            trained=sum(sample.loss_mask),
            weight=sample.weight,
            calls=tuple(
                ExplainedSpan(numbers.get(span.call_id), span.call_id, span.start, span.end) for span in sample.spans
            ),
        )
        for number, sample in enumerate(samples, start=1)
    )
