"""Runs one episode: workflow, then judge. Errors become failed episodes, never a crash."""

from __future__ import annotations

import asyncio
import copy
import time
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from astuner.context_tracker.merge import MergeMode
from astuner.debugging.breakpoints import DebuggerQuit, is_debugged
from astuner.debugging.deadlines import deadline
from astuner.debugging.tracebacks import error_location, format_error
from astuner.env_service.episodes import EpisodeEnvironments
from astuner.errors import (
    AgentMadness,
    CallLimitError,
    EpisodeError,
    EpisodeTimeout,
    JudgeError,
    UnjudgedError,
    WorkflowError,
    describe_error,
    message_of,
    short_repr,
)
from astuner.gateway.http_server import Gateway
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import Targets
from astuner.model_tuner.tuner import ModelTuner
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Episode, Judgement, LlmCall, WorkflowOutput, WorkflowTask, checked_reward
from astuner.system.clock import timestamp
from astuner.task_judge.judge_base import BaseGroupJudge, BaseJudge
from astuner.task_judge.scoring import score
from astuner.task_runner.groups import (
    UNJUDGED,
    cut_text,
    judged_reward,
    mean_reward,
    with_rewards,
    with_samples,
    with_steps,
)
from astuner.workflow import Workflow, wrong_output


@dataclass
class _EpisodeRun:
    """A running episode.

    Attributes:
        seconds: the time limit of the workflow; None for no limit.
        workflow: None until it has started.
    """

    task: WorkflowTask
    tuner: ModelTuner
    seconds: float | None
    workflow: Workflow | None = None

    @property
    def metadata(self) -> Mapping[str, object]:
        return {} if self.workflow is None else self.workflow.episode_metadata


@dataclass(frozen=True)
class TaskRunner:
    """Runs episodes of one workflow; keeps no state between them.

    Attributes:
        workflow: returns a new workflow for each episode.
        judge: scores episodes whose workflow returned no reward; None if the workflow always returns one.
        engine, codec: the model.
        episode_timeout, judge_timeout: seconds; not applied while a debugger is attached.
        merge: how calls become samples.
        madness_reward: the reward of an episode with degenerate model output.
        on_max_steps: what happens at a call beyond the limit: `judge` cuts the episode, which is judged with its last
            answer; `fail` fails it.
        judge_inline: run the judge in the episode's thread, where breakpoints work as in the workflow.
        gateway: serves the model of the episodes over HTTP.
        environments: creates the environments of the episodes.
    """

    workflow: Callable[[], Workflow]
    judge: BaseJudge | None
    engine: LlmEngine | None
    codec: ChatCodec
    episode_timeout: float = 600.0
    judge_timeout: float = 60.0
    max_samples: int = 30
    merge: MergeMode = "leaf"
    targets: Targets = field(default_factory=Targets)
    madness_reward: float = -1.0
    on_max_steps: Literal["judge", "fail"] = "judge"
    judge_inline: bool = False
    on_call: Callable[[LlmCall], None] | None = None
    gateway: Gateway = field(default_factory=Gateway)
    environments: EpisodeEnvironments = field(default_factory=EpisodeEnvironments)

    def tuner(self, workflow_task: WorkflowTask, settings: CallSettings) -> ModelTuner:
        """Return the model for one episode, which records the episode's calls."""
        assert self.engine is not None
        return ModelTuner(
            self.engine,
            self.codec,
            settings,
            episode_id=workflow_task.episode_id,
            seed=workflow_task.seed,
            targets=self.targets,
            on_call=self.on_call,
            endpoints=self.gateway,
        )

    async def run(self, workflow_task: WorkflowTask, tuner: ModelTuner) -> Episode:
        """Run one episode. Errors in the workflow and the judge are not raised; they make the episode `failed`."""
        started = timestamp()
        episode = Episode(
            episode_id=workflow_task.episode_id,
            task=workflow_task.task,
            repeat_index=workflow_task.repeat_index,
            status="failed",
            reward=None,
            is_success=None,
            start_time=started,
        )
        limit = None if is_debugged() else self.episode_timeout
        run = _EpisodeRun(workflow_task, tuner, limit)
        try:
            entered = time.monotonic()
            async with self.environments.instance(workflow_task, limit) as env:
                # The limit is that of the whole episode, also for the pools that end episodes from outside.
                run.seconds = None if limit is None else max(limit - (time.monotonic() - entered), 0.0)
                # The workflow may change its task, which other episodes and the record share.
                run.task = replace(workflow_task, task=copy.deepcopy(workflow_task.task), env=env)
                output = await self._workflow_output(run)
                # How often the run's settings replaced a parameter of the episode's calls.
                replaced = {f"replaced_{name}": float(n) for name, n in sorted(tuner.replaced_parameters.items())}
                episode = replace(
                    episode,
                    metadata=plain_metadata(output.metadata),
                    log_metrics={**output.log_metrics, **replaced},
                    calls=with_steps(tuner.calls, output.steps) if output.steps else (),
                )
                if output.reward is None and isinstance(self.judge, BaseGroupJudge):
                    raise UnjudgedError(cut_text(tuner.call_limit_error) or UNJUDGED)
                if output.reward is None:
                    episode = replace(episode, judgement=await self._judgement(run, output))
            episode = _rewarded(episode, output, tuner)
        except DebuggerQuit:
            raise
        # The judge and the output are the user's code, too.
        except BaseException as error:
            is_known = issubclass(type(error), EpisodeError)  # `isinstance` would read `__class__`
            failure = cast(EpisodeError, error) if is_known else _workflow_error(error)
            episode = replace(
                episode,
                calls=episode.calls or tuner.calls,
                error_kind=str(failure.kind),
                error=message_of(failure),
                error_traceback=None if isinstance(failure, UnjudgedError) else format_error(error),
                metadata=episode.metadata or plain_metadata(run.metadata),
            )
        episode = replace(episode, anomaly=tuner.anomaly, end_time=timestamp())
        return with_samples(episode, max_samples=self.max_samples, merge=self.merge, seed=workflow_task.seed)

    async def _workflow_output(self, run: _EpisodeRun) -> WorkflowOutput:
        """Return the output of the workflow. The reward is None if the judge computes it."""
        tuner = run.tuner
        try:
            output = await self._execute_at_gateway(run)
        except AgentMadness:
            output = WorkflowOutput()
        except CallLimitError as error:
            if self.on_max_steps == "fail":
                raise
            if self.judge is None and tuner.anomaly is None:
                raise CallLimitError(
                    f"{error}. The episode was cut and has no reward: set task_judge.judge_protocol, or catch "
                    "astuner.errors.CallLimitError in the workflow and return a WorkflowOutput with a reward"
                ) from error
            answered = [call for call in tuner.calls if call.messages and not call.cut]
            text = str(answered[-1].messages[-1].get("content") or "") if answered else ""
            output = WorkflowOutput(metadata={"final_answer": text})
        else:
            if tuner.call_limit_error is not None and self.on_max_steps == "fail":
                raise tuner.call_limit_error
        if added := run.metadata:
            output = replace(output, metadata={**added, **output.metadata})
        if tuner.anomaly is not None:
            return replace(output, reward=self.madness_reward, is_success=False, steps=())
        return output

    async def _judgement(self, run: _EpisodeRun, output: WorkflowOutput) -> Judgement:
        if self.judge is None:
            raise JudgeError(
                "the workflow returned no reward and no judge is configured: return "
                "WorkflowOutput(reward=…) or set task_judge.judge_protocol"
            )
        limit = None if is_debugged() else self.judge_timeout
        output = replace(output, calls=tuple(run.tuner.calls))
        result = await score(
            self.judge, run.task, output, limit, lambda: describe_calls(run.tuner), inline=self.judge_inline
        )
        return replace(result, metadata=plain_metadata(result.metadata))

    async def _execute_at_gateway(self, run: _EpisodeRun) -> WorkflowOutput:
        """Run the workflow while the gateway serves its model."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed
                # After the workflow, the judge runs in the same task.
                loop.call_soon_threadsafe(lambda: session.is_closed or task.cancel())

        with self.gateway.episode(run.tuner, cancel, run.seconds) as session:
            try:
                output = await self._execute(run)
            except WorkflowError as error:
                cause = session.cause_of(error)
                if cause is None:
                    raise
                raise cause from error
        if session.failure is not None and not isinstance(session.failure, AgentMadness):
            raise session.failure
        return output

    async def _execute(self, run: _EpisodeRun) -> WorkflowOutput:
        tuner, limit, started = run.tuner, run.seconds, time.monotonic()

        def late() -> str:
            return (
                f"the workflow took longer than rollout.episode_timeout ({self.episode_timeout:g} s); "
                f"{describe_calls(tuner)}"
            )

        timeout: asyncio.Timeout | None = None  # stays None if the episode is interrupted before the block starts
        try:
            async with deadline(limit, lambda: f"episode {run.task.episode_id}: {late()}") as timeout:
                run.workflow = self.workflow()
                result: object = run.workflow.execute(run.task, tuner)
                if not isinstance(result, Awaitable):
                    raise WorkflowError(
                        f"execute returned {type(result).__name__}, not an awaitable: write it as "
                        "`async def execute(self, workflow_task, model_tuner)`"
                    )
                output = _checked_output(await result)
        # The deadline is the only thing that cancels tasks of the thread's event loop. So whatever the workflow raises,
        # including a KeyboardInterrupt, ends this episode only.
        except BaseException as error:
            if issubclass(type(error), BdbQuit):  # `isinstance` would read `__class__`, which may be overridden
                raise DebuggerQuit from error
            if tuner.call_limit_error is not None:
                raise tuner.call_limit_error from error
            if timeout is not None and timeout.expired():
                raise EpisodeTimeout(late()) from error
            if issubclass(type(error), EpisodeError):
                raise
            if tuner.anomaly is not None:
                raise AgentMadness(str(tuner.anomaly)) from error
            raise _workflow_error(error) from error
        finally:
            await _drop_cancellation()
        # The workflow suppressed its cancellation, or blocked the thread past the deadline.
        if timeout.expired() or (limit is not None and time.monotonic() - started > limit):
            raise EpisodeTimeout(late())
        return output


def _rewarded(episode: Episode, output: WorkflowOutput, tuner: ModelTuner) -> Episode:
    """Return the episode with its calls, and with the judge's rewards or, without a judge, the workflow's."""
    judgement, limit_error = episode.judgement, tuner.call_limit_error
    reward = output.reward if judgement is None else judged_reward(judgement)
    success = output.is_success if judgement is None else judgement.is_success
    assert reward is not None
    mean = mean_reward(reward)
    return replace(
        episode,
        status="ok",
        error_kind=None if limit_error is None else CallLimitError.kind,
        error=cut_text(limit_error),
        calls=with_rewards(episode.calls or tuner.calls, reward, judged=judgement is not None),
        reward=mean,
        agent_rewards=reward if isinstance(reward, Mapping) else {},
        is_success=mean > 0 if success is None else success,
    )


async def _drop_cancellation() -> None:
    """Drop a cancellation that the workflow has requested for its own task, so that it does not reach the judge."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


def _workflow_error(error: BaseException) -> WorkflowError:
    return WorkflowError(f"{describe_error(error)}{error_location(error)}")


def plain_metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """Return the metadata as JSON values, so that the record does not call methods of the user's objects."""
    plain = to_jsonable(metadata, lambda text: text)
    return plain if isinstance(plain, dict) else {"metadata": plain}


def _checked_output(output: object) -> WorkflowOutput:
    """Return a workflow's output with the log metrics as floats."""
    if not isinstance(output, WorkflowOutput):
        raise wrong_output("execute", "a WorkflowOutput", output)
    numbers = {
        str.__str__(str(name)): checked_reward(value, f"log_metrics[{short_repr(name)}]")
        for name, value in output.log_metrics.items()
    }
    return WorkflowOutput(output.reward, output.is_success, output.metadata, numbers, steps=output.steps)


def describe_calls(tuner: ModelTuner) -> str:
    """Describe the last finished LLM call of an episode and its open calls: model, prompt tokens, seconds."""

    def model(target_tag: str, agent_name: str) -> str:
        return f"model {target_tag}" + (f" for {agent_name}" if agent_name else "")

    now, calls = timestamp(), tuner.calls
    parts = ["no LLM call finished"]
    if calls:
        last = calls[-1]
        parts = [
            f"last finished LLM call {last.call_id} ({model(last.target_tag, last.agent_name)}, "
            f"{len(last.prompt_ids)} prompt tokens, {now - last.end_time:.1f} s ago)"
        ]
    for call in tuner.open_calls:
        tokens = "" if call.prompt_tokens is None else f"{call.prompt_tokens} prompt tokens, "
        seconds = now - call.start_time
        parts.append(f"open LLM call ({model(call.target_tag, call.agent_name)}, {tokens}started {seconds:.1f} s ago)")
    return ", ".join(parts)
