"""One task, one workflow, one reward: whatever goes wrong becomes a failed episode, never a crash."""

from __future__ import annotations

import asyncio
import sysconfig
import time
import traceback
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from astuner.breakpoints import is_debugged
from astuner.context_tracker import MergeMode, build_samples, limit_samples
from astuner.deadlines import deadline
from astuner.errors import AgentMadness, EpisodeError, EpisodeTimeout, JudgeError, WorkflowError
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import CallSettings, ChatCodec, ModelTuner, Targets
from astuner.schema import Episode, LlmCall, WorkflowOutput, WorkflowTask, checked_reward
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.scoring import score, score_in_place
from astuner.task_runner.last_call import last_call
from astuner.task_runner.rewards import mean_reward, share_out
from astuner.workflow import Workflow

_PACKAGE = f"{Path(__file__).parents[1]}/"


@dataclass(frozen=True)
class TaskRunner:
    """Runs episodes of one workflow; holds no state between them.

    Attributes:
        workflow: makes a fresh workflow for each episode.
        judge: scores episodes whose workflow returned no reward; None where the workflow always does.
        engine, codec: the model.
        episode_timeout, judge_timeout: seconds; they do not hold in a process that is debugged.
        max_samples: the most timelines that are trained of one episode.
        merge: how calls become samples.
        targets: which of the workflow's agents are trained.
        madness_reward: the reward of an episode whose model lost control.
        judges_in_place: ask the judge in the episode's own thread, where breakpoints stop as in the workflow.
    """

    workflow: Callable[[], Workflow]
    judge: BaseJudge | None
    engine: LlmEngine
    codec: ChatCodec
    episode_timeout: float = 600.0
    judge_timeout: float = 60.0
    max_samples: int = 30
    merge: MergeMode = "leaf"
    targets: Targets = field(default_factory=Targets)
    madness_reward: float = -1.0
    judges_in_place: bool = False

    def tuner(self, workflow_task: WorkflowTask, settings: CallSettings) -> ModelTuner:
        """Return the model for one episode, which records its calls."""
        return ModelTuner(
            self.engine,
            self.codec,
            settings,
            episode_id=workflow_task.episode_id,
            seed=workflow_task.seed,
            targets=self.targets,
        )

    async def run(self, workflow_task: WorkflowTask, tuner: ModelTuner) -> Episode:
        """Run one episode to its end; never raises for anything that the workflow or the judge does."""
        started = time.time()
        episode = Episode(
            episode_id=workflow_task.episode_id,
            task=workflow_task.task,
            repeat_index=workflow_task.repeat_index,
            status="failed",
            reward=None,
            is_success=None,
            start_time=started,
        )
        try:
            output = await self._outcome(workflow_task, tuner)
            assert output.reward is not None
            calls = share_out(output.reward, tuner.calls)
        except EpisodeError as error:
            calls = tuner.calls
            episode = replace(episode, error_kind=error.kind, error=str(error))
        else:
            episode = replace(
                episode,
                status="ok",
                reward=mean_reward(output.reward),
                agent_rewards=output.reward if isinstance(output.reward, Mapping) else {},
                is_success=output.is_success,
                metadata=output.metadata,
                log_metrics=output.log_metrics,
            )
        return self._with_samples(replace(episode, calls=calls, end_time=time.time()), workflow_task.seed)

    async def _outcome(self, workflow_task: WorkflowTask, tuner: ModelTuner) -> WorkflowOutput:
        """Return an output whose reward and success are known."""
        try:
            output = await self._execute(workflow_task, tuner)
        except AgentMadness:
            output = WorkflowOutput()
        if tuner.madness is not None:
            return replace(
                output,
                reward=self.madness_reward,
                is_success=False,
                metadata={**output.metadata, "madness": tuner.madness},
            )
        if output.reward is None:
            if self.judge is None:
                raise JudgeError(
                    "the workflow returned no reward and no judge is configured: return "
                    "WorkflowOutput(reward=…) or set task_judge.judge_protocol"
                )
            ask = score_in_place if self.judges_in_place else score
            limit = None if is_debugged() else self.judge_timeout
            reward, success = await ask(self.judge, workflow_task, output, limit, lambda: last_call(tuner))
            return replace(output, reward=reward, is_success=success)
        if output.is_success is None:
            return replace(output, is_success=mean_reward(output.reward) > 0)
        return output

    async def _execute(self, workflow_task: WorkflowTask, tuner: ModelTuner) -> WorkflowOutput:
        slow = f"episode {workflow_task.episode_id}: "
        limit = None if is_debugged() else self.episode_timeout
        begun = time.monotonic()
        timeout: asyncio.Timeout | None = None  # until an episode that is interrupted at once has got one
        try:
            async with deadline(limit, lambda: slow + _too_slow(self.episode_timeout, tuner)) as timeout:
                output = _checked(await _awaitable(self.workflow().execute(workflow_task, tuner)))
        # Of the thread's own loop nothing but the deadline cancels, so that whatever comes out of the workflow,
        # a KeyboardInterrupt of its own included, ends this episode and no other.
        except BaseException as error:
            if isinstance(error, BdbQuit):  # whoever leaves the debugger means the run
                raise KeyboardInterrupt from error
            if timeout is not None and timeout.expired():
                raise EpisodeTimeout(_too_slow(self.episode_timeout, tuner)) from error
            if isinstance(error, EpisodeError):
                raise
            if tuner.madness is not None:
                raise AgentMadness(tuner.madness) from error
            raise WorkflowError(_describe(error)) from error
        # The workflow took its cancellation for something else and went on, or held the thread, out of its reach.
        if timeout.expired() or (limit is not None and time.monotonic() - begun > limit):
            raise EpisodeTimeout(_too_slow(self.episode_timeout, tuner))
        return output

    def _with_samples(self, episode: Episode, seed: int) -> Episode:
        if episode.status != "ok":
            return episode
        samples, dropped = limit_samples(build_samples(episode.calls), self.max_samples, seed)
        if self.merge != "leaf":  # of the same timelines, so that what is trained does not depend on how
            kept = {span.call_id for sample in samples for span in sample.spans}
            samples = build_samples([call for call in episode.calls if call.call_id in kept], self.merge)
        if samples:
            return replace(episode, samples=tuple(samples), dropped_samples=dropped)
        return replace(
            episode,
            status="dropped",
            error_kind="no_tokens",
            error=_nothing_to_train(episode.calls),
        )


def _nothing_to_train(calls: Sequence[LlmCall]) -> str:
    if not calls or any(call.trained for call in calls):
        return "the workflow made no LLM call that gave a token, so there is nothing to train on"
    return (
        "no LLM call of the episode was of a target in rollout.trainable_targets, so there is nothing to train on; it "
        f"asked for: {', '.join(sorted({call.target_tag for call in calls}))}"
    )


def _awaitable(given: object) -> Awaitable[object]:
    if not isinstance(given, Awaitable):
        raise WorkflowError(
            f"execute returned {type(given).__name__} at once: write it as `async def execute(self, workflow_task, "
            "model_tuner)`"
        )
    return given


def _checked(output: object) -> WorkflowOutput:
    """Return a workflow's output with numbers for log_metrics.

    Raises:
        WorkflowError: it is none, or has a log metric that is no number.
    """
    if not isinstance(output, WorkflowOutput):
        raise WorkflowError(f"execute must return a WorkflowOutput, got {type(output).__name__}: {str(output)[:200]!r}")
    numbers = {name: checked_reward(value, f"log_metrics[{name!r}]") for name, value in output.log_metrics.items()}
    return replace(output, log_metrics=numbers)


def _describe(error: BaseException) -> str:
    """Return the error and the innermost line of the workflow's own code, without a wall of text."""
    frames = traceback.extract_tb(error.__traceback__)
    place = own_frame(frames) or frames[-1]
    return f"{type(error).__name__}: {error} (at {place.filename}:{place.lineno}, in {place.name})"


def own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame that is neither of astuner nor of an installed package, if there is one."""
    foreign = (_PACKAGE, sysconfig.get_path("stdlib"), "<frozen")
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(foreign)]
    return own[-1] if own else None


def _too_slow(seconds: float, tuner: ModelTuner) -> str:
    return f"the workflow took longer than rollout.episode_timeout ({seconds:g} s); {last_call(tuner)}"
