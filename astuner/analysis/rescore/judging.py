"""Judging of recorded episodes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from astuner.errors import (
    EpisodeError,
    JudgeError,
    JudgeUnavailableError,
    RecordError,
    UnjudgedError,
    UnscoredError,
    message_of,
    short_repr,
)
from astuner.run_record.episode_file import unfold_calls
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.jsonable import decode
from astuner.schema import Episode, Judgement, LlmCall, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.batch_scoring import score_batch
from astuner.task_judge.judge_base import BaseGroupJudge, BaseJudge
from astuner.task_judge.scoring import score, score_group
from astuner.task_runner.groups import judged_reward, mean_reward, with_rewards

# Episodes that are in memory at the same time.
_CHUNK = 512


class RecordedOutput(WorkflowOutput):
    """The output of a recorded workflow. Its calls are decoded when they are first read, as most judges do not."""

    __slots__ = ("_calls",)
    _calls: tuple[LlmCall, ...] | Callable[[], tuple[LlmCall, ...]]

    @property
    def calls(self) -> tuple[LlmCall, ...]:
        """The episode's LLM calls, in order of completion."""
        calls = self._calls
        if not isinstance(calls, tuple):
            self._calls = calls = calls()
        return calls

    @calls.setter
    def calls(self, calls: tuple[LlmCall, ...] | Callable[[], tuple[LlmCall, ...]]) -> None:
        self._calls = calls


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A recorded episode, as its judge saw it.

    Attributes:
        task: The task and the episode's identity; the environment and the seed are not recorded.
        agent_rewards: The recorded rewards by agent.
        call_rows: The recorded id, agent, reward and training of each call, in order.
        has_anomaly: Whether degenerate output gave the episode its reward.
    """

    entry: EpisodeEntry
    task: WorkflowTask
    output: RecordedOutput
    agent_rewards: Mapping[str, float]
    call_rows: Sequence[LlmCall]
    has_anomaly: bool


def read_judge_inputs(folder: Path, entries: Iterable[EpisodeEntry]) -> Iterator[JudgeInput]:
    """Yield a judge's inputs for a run's episodes, one after the other to limit the memory.

    Token ids, messages and samples are not decoded, so that this is about ten times as fast as `read_episode`.

    Raises:
        RecordError: If an episode's file cannot be read.
    """
    for entry in entries:
        path = folder / entry.path
        try:
            data = path.read_bytes()
            try:
                document = orjson.loads(data)
            except orjson.JSONDecodeError:  # for example a lone surrogate, which the standard library accepts
                document = json.loads(data)
            yield _judge_input(entry, document["episode"])
        except OSError as error:
            raise RecordError(f"cannot read the episode {path}: {error.strerror or error}") from error
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise RecordError(f"{path} contains no complete episode: {short_repr(error)}") from error


def _judge_input(entry: EpisodeEntry, row: dict[str, Any]) -> JudgeInput:
    rows = row["calls"]

    def decode_calls() -> tuple[LlmCall, ...]:
        unfold_calls(rows)
        return tuple(decode(LlmCall, call) for call in rows)

    output = RecordedOutput(metadata=row.get("metadata") or {}, log_metrics=row.get("log_metrics") or {})
    output.calls = decode_calls
    task = WorkflowTask(
        decode(Task, row["task"]), entry.episode_id, entry.repeat_index, is_validation=entry.split == "val"
    )
    agent_rewards = row.get("agent_rewards") or {}
    call_rows = [
        LlmCall(
            call["call_id"], "", (), (), (), "stop",
            agent_name=call.get("agent_name") or "", trained=bool(call.get("trained", True)), reward=call.get("reward"),
        )
        for call in rows
    ]  # fmt: skip
    return JudgeInput(entry, task, output, agent_rewards, call_rows, bool(row.get("anomaly")))


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """A recorded episode and its new reward.

    Attributes:
        before, after: The episode with its recorded and its new rewards. They have the ids, agents and rewards of the
            calls, and neither messages nor tokens.
        judgement: The result of the judge; None if it was not asked, or failed.
        was_asked: Whether the judge was asked; if not, the episode keeps its reward.
    """

    entry: EpisodeEntry
    before: Episode
    after: Episode
    judgement: Judgement | None
    was_asked: bool = True


def has_output(entry: EpisodeEntry) -> bool:
    """Return whether a recorded episode has an output to judge: its workflow has not failed."""
    kind = entry.error_kind or ""
    return entry.status != "failed" or kind.partition("/")[0] in (
        JudgeError.kind,
        UnjudgedError.kind,
        UnscoredError.kind,
    )


def judge_episodes(
    folder: Path,
    entries: Iterable[EpisodeEntry],
    judge: BaseJudge,
    *,
    timeout: float,
    jobs: int,
    on_judged: Callable[[int], None] = lambda _: None,
    keep_tokens: bool = False,
) -> list[JudgedEpisode]:
    """Judge episodes of a run, `jobs` at a time. The record is only read.

    Args:
        folder, entries: The run's folder, and episodes with an output (see `has_output`).
        timeout: Seconds that the judge may take for an episode.
        jobs: Number of episodes that are judged at the same time.
        on_judged: Called with the number of episodes after each part.
        keep_tokens: Whether the calls of `JudgedEpisode` have their tokens, for length punishments.

    Raises:
        RecordError: If an episode's file cannot be read.
        JudgeUnavailableError: If the judge cannot score any further episode.
    """
    if isinstance(judge, BaseGroupJudge):
        entries = sorted(entries, key=_group_of)
    inputs = read_judge_inputs(folder, entries)

    async def run() -> list[JudgedEpisode]:
        judged: list[JudgedEpisode] = []
        chunks = _chunks(inputs)
        while chunk := _next_chunk(chunks):
            asked = [each for each in chunk if not each.has_anomaly]
            results = dict(zip(map(id, asked), await _score_all(judge, asked, timeout, jobs), strict=True))
            judged += [_judged(each, results.get(id(each)), keep_tokens) for each in chunk]
            on_judged(len(chunk))
        return judged

    return asyncio.run(run())


async def _score_all(
    judge: BaseJudge, episodes: Sequence[JudgeInput], timeout: float, jobs: int
) -> list[Judgement | EpisodeError]:
    """Return each episode's judgement, or the judge's error. A synchronous judge runs in `jobs` threads."""
    if isinstance(judge, BaseGroupJudge):
        return await _score_groups(judge, episodes, timeout, jobs)
    pairs = [(each.task, each.output) for each in episodes]
    if not inspect.iscoroutinefunction(judge.compute_reward):
        size = max(1, math.ceil(len(pairs) / jobs))
        parts = (pairs[start : start + size] for start in range(0, len(pairs), size))
        results = await asyncio.gather(*(score_batch(judge, part, timeout) for part in parts))
        return list(itertools.chain.from_iterable(results))
    slots = asyncio.Semaphore(jobs)

    async def score_one(task: WorkflowTask, output: WorkflowOutput) -> Judgement | EpisodeError:
        async with slots:
            try:
                return await score(judge, task, output, timeout)
            except EpisodeError as error:
                return error

    return await asyncio.gather(*(score_one(*pair) for pair in pairs))


async def _score_groups(
    judge: BaseGroupJudge, episodes: Sequence[JudgeInput], timeout: float, jobs: int
) -> list[Judgement | EpisodeError]:
    """Return the judgements of whole groups, which are adjacent."""
    slots = asyncio.Semaphore(jobs)

    async def score_one(group: Sequence[JudgeInput]) -> Sequence[Judgement | EpisodeError]:
        async with slots:
            try:
                return await score_group(judge, group[0].task, [each.output for each in group], timeout)
            except EpisodeError as error:
                return [error] * len(group)

    groups = [list(group) for _, group in itertools.groupby(episodes, lambda each: _group_of(each.entry))]
    return list(itertools.chain.from_iterable(await asyncio.gather(*map(score_one, groups))))


def _group_of(entry: EpisodeEntry) -> tuple[int, str]:
    return entry.step, entry.task_id


def _next_chunk(chunks: Iterator[list[JudgeInput]]) -> list[JudgeInput]:
    """Read the next part of the episodes; return [] at the end.

    The garbage collector is paused. Parsed JSON has no cycles, and the collector would take half of the time, as it
    visits all token id lists again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return next(chunks, [])
    finally:
        if was_enabled:
            gc.enable()


def _chunks(inputs: Iterator[JudgeInput]) -> Iterator[list[JudgeInput]]:
    """Yield the episodes in parts that do not divide the episodes of a task that follow each other."""
    chunk: list[JudgeInput] = []
    for each in inputs:
        if len(chunk) >= _CHUNK and _group_of(chunk[-1].entry) != _group_of(each.entry):
            yield chunk
            chunk = []
        chunk.append(each)
    if chunk:
        yield chunk


def _judged(recorded: JudgeInput, result: Judgement | EpisodeError | None, keep_tokens: bool) -> JudgedEpisode:
    entry = recorded.entry
    calls = recorded.output.calls if keep_tokens else tuple(recorded.call_rows)
    before = Episode(
        entry.episode_id, recorded.task.task, entry.repeat_index, entry.status, entry.reward, entry.is_success,
        calls=calls, agent_rewards=recorded.agent_rewards, error_kind=entry.error_kind, error=entry.error,
    )  # fmt: skip
    if result is None:
        return JudgedEpisode(entry, before, before, None, was_asked=False)
    if any(call.reward is not None for call in calls):
        calls = tuple(replace(call, reward=None) for call in calls)
    after = Episode(entry.episode_id, recorded.task.task, entry.repeat_index, "failed", None, None, calls=calls)
    try:
        if isinstance(result, EpisodeError):
            raise result
        reward = judged_reward(result)
        after = replace(
            after,
            # An episode whose judge failed has samples as well; one without trainable tokens remains untrained.
            status="dropped" if entry.status == "dropped" else "ok",
            reward=mean_reward(reward),
            is_success=result.is_success,
            calls=with_rewards(calls, reward, judged=True),
            agent_rewards=result.agent_rewards,
        )
    except JudgeUnavailableError:
        raise
    except EpisodeError as error:
        after = replace(after, error_kind=str(error.kind), error=message_of(error))
    return JudgedEpisode(entry, before, after, result if isinstance(result, Judgement) else None)
