"""Parts that training and evaluation share: running batches of episodes, validating and writing the summary."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loguru import logger

from astuner.backbone.base import RunContext
from astuner.backbone.training.run_inputs import call_settings, greedy_validation_notice, validation_repeats
from astuner.backbone.training.run_state import RunState, validation_entry
from astuner.config.root import AstunerConfig
from astuner.config.services import check_budget
from astuner.errors import BackboneError, JudgeBudgetError, JudgeUnavailableError
from astuner.run_record.summary import RunSummary
from astuner.schema import Episode, Split, Task
from astuner.system.clock import timestamp
from astuner.system.signals import signals_deferred
from astuner.task_rollout.rollout import BatchRequest, OnEpisode
from astuner.task_rollout.statistics import tokens_of, validation_result

if TYPE_CHECKING:
    from astuner.algorithms.credit_assignment import UpdateResult
    from astuner.backbone.training.schedule import TaskOrder

RollOut = Callable[[BatchRequest, OnEpisode, OnEpisode], list[Episode]]
"""Runs the episodes of a request; see `TrainingSession.roll_out`."""


class TrainingSession(Protocol):
    """A model, the optimizer that trains it and the engine that samples from it.

    Each backbone implements it once. The training loop and the evaluation use a backbone through this interface only.
    """

    def roll_out(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Run episodes and return them by task and then repeat.

        Failed episodes are included, with their reason. An episode that was retried is preceded by its failed attempts.

        Args:
            on_episode: called in this thread with each finished episode.
            on_attempt: called in this thread with each finished episode and each failed attempt that is retried.

        Raises:
            ModelError: the engine failed. To a workflow, a broken engine looks like an episode that failed.
        """
        ...

    def update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Update the weights.

        Args:
            episodes: the episodes of training step `step` that have a reward and samples.
            step: 1-based.

        Raises:
            BackboneError: the engine did not sample with the trained weights, or the gradient is not finite.
        """
        ...

    def sync(self, step: int) -> None:
        """Make the engine sample with the weights as they are after `step` training steps.

        Called once before the first rollout, and after each update.
        """
        ...

    def save(self, step: int, progress: dict[str, Any]) -> bool:
        """Write the checkpoint of `step`; return False if this step has no weights that could be saved.

        `progress` is the state of the loop, as plain values. RecordError: the checkpoint cannot be written.
        """
        ...

    def load(self) -> dict[str, Any] | None:
        """Restore the newest checkpoint; return its progress, or None without one. RecordError: it cannot be read."""
        ...

    def save_model(self, folder: Path, step: int) -> None:
        """Write the model after `step` training steps as a Hugging Face folder, with adapters merged."""
        ...

    @property
    def compute_dtype(self) -> str | None:
        """Name of the dtype that the model computes in, for example `float32`; None if unknown."""
        return None

    # Hooks for backbones whose rollout and update run asynchronously, in other processes.

    @property
    def steps_ahead(self) -> int:
        """How many training steps may start before the results of a step are known."""
        return 0

    def use_order(self, order: TaskOrder) -> None:
        """Take the order of the training tasks. Called once, before the first training step."""
        return

    def record_success(self, step: int, success_rates: Mapping[str, float]) -> None:
        """Take a finished training step's success rates by task id.

        Called only if the tasks of later steps depend on it; `order.sampler` of `use_order` already has it.
        """
        return

    def wait_for_update(self, step: int) -> None:
        """Wait until `update(..., step)` can return immediately.

        A signal can interrupt this wait, but not `update`. After an interruption and `end_training`, the loop may call
        `roll_out` and this method again for the same step.
        """
        return

    def end_training(self, step: int) -> int:
        """Start no further update; return the last step whose update has started. Called once, after an interruption.

        Args:
            step: the number of finished training steps.
        """
        return step

    def validation(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the engine samples validation episodes with the weights after `step` steps."""
        return contextlib.nullcontext()


def batch_request(
    config: AstunerConfig, tasks: Sequence[Task], repeats: int, split: Split, step: int, seed: int | None = None
) -> BatchRequest:
    """Return the request for `repeats` episodes of each task; `seed` defaults to `trainer_common.seed`."""
    return BatchRequest(
        tasks=tasks,
        repeats=repeats,
        split=split,
        step=step,
        seed=config.trainer_common.seed if seed is None else seed,
        settings=call_settings(config, validation=split == "val"),
    )


def run_batch(
    context: RunContext,
    state: RunState,
    roll_out: RollOut,
    request: BatchRequest,
    title: str,
    on_attempt: OnEpisode = lambda _: None,
) -> list[Episode]:
    """Run the episodes of `request` and return them. The progress shows their number, tokens and mean reward."""
    rewarded = [0, 0.0]  # number of episodes, and the sum of their rewards
    ended_tokens = 0

    def tokens() -> int:
        return ended_tokens + context.active_episodes.sampled_tokens()

    with (
        context.phase("validation" if request.split == "val" else "rollout"),
        context.progress.bar(title, len(request.episodes()), unit="episodes", tokens=tokens),
    ):

        def on_end(episode: Episode) -> None:
            nonlocal ended_tokens
            ended_tokens += sum(len(call.completion_ids) for call in episode.calls)
            on_attempt(episode)

        def on_episode(episode: Episode) -> None:
            if episode.reward is not None:
                rewarded[0] += 1
                rewarded[1] += episode.reward
                if state.first_reward_seconds is None:
                    state.first_reward_seconds = timestamp() - context.started
            context.progress.advance(note=f"reward {rewarded[1] / rewarded[0]:.2f}" if rewarded[0] else None)

        return roll_out(request, on_episode, on_end)


def run_validation(context: RunContext, session: TrainingSession, state: RunState, title: str) -> None:
    """Run the validation tasks, if there are any; write episodes and metrics to the record and the result to `state`.

    Raises:
        BackboneError: no episode of the run has been scored so far.
    """
    config, tasks, step = context.config.astuner, context.run_inputs.tasks.validation, state.step
    if not tasks:
        return
    if state.latest is None and (notice := greedy_validation_notice(config)) is not None:
        logger.info(notice)
    started = timestamp()
    request = batch_request(config, tasks, validation_repeats(config), "val", step)
    with session.validation(step):
        episodes = run_batch(context, state, session.roll_out, request, title)
        result = validation_result(episodes, config.trainer_common.val_pass_n)
        with signals_deferred():
            for episode in episodes:
                context.record.write_episode(step, "val", episode, tokens=tokens_of([episode]))
            check_judge(config, state, episodes)
            if state.totals.ok == 0:
                check_any_succeeded(episodes)
            metrics = {
                "val/reward": result.reward,
                "val/success_rate": result.success_rate,
                "val/episodes": result.episodes,
                "val/lost": result.lost,
                "time/validation": timestamp() - started,
            }
            metrics |= {f"val/pass@{k}": value for k, value in result.pass_at_k.items()}
            metrics |= {f"val/success_rate/{source}": rate for source, rate in result.success_by_source.items()}
            context.record.log_metrics(step, metrics)
            state.latest = validation_entry(result)
            state.validated = step


def evaluate(context: RunContext, session: TrainingSession) -> RunSummary:
    """Validate the model without training, and write the summary."""
    state = RunState()
    session.sync(0)
    run_validation(context, session, state, "validation")
    state.after = state.latest
    return write_summary(context, state, context.run_inputs.model_path)


def dry_run(
    context: RunContext, roll_out: RollOut, split: Split, state: RunState | None = None, seed: int | None = None
) -> list[Episode]:
    """Run the episodes of the first `debug.debug_first_n_tasks` tasks, as a training step or a validation would.

    Each episode is recorded as soon as it has finished, so that the viewer shows it and an interrupted run keeps it.
    """
    config, tasks = context.config.astuner, context.run_inputs.tasks
    validation = split == "val"
    step = 0 if validation else 1
    first_tasks = (tasks.validation if validation else tasks.training)[: config.debug.debug_first_n_tasks]
    repeats = config.rollout.num_repeat
    if validation:
        repeats = min(config.rollout.val_kwargs.num_repeat, validation_repeats(config))
    request = batch_request(config, first_tasks, repeats, split, step, seed)

    def on_attempt(episode: Episode) -> None:
        context.record.write_episode(step, split, episode, tokens=tokens_of([episode]))
        context.on_episode(episode)

    state = state or RunState()
    episodes = run_batch(context, state, roll_out, request, "dry run", on_attempt)
    check_judge(config, state, episodes)
    if not validation:
        context.monitor.check_rollout(step, episodes)
    return episodes


def check_judge(config: AstunerConfig, state: RunState, episodes: Sequence[Episode]) -> None:
    """Add the judge LLM's use for `episodes` to `state`, and stop the run if the LLM is no longer available.

    Raises:
        JudgeUnavailableError: the endpoint has rejected all keys.
        JudgeBudgetError: the budget is used up.
    """
    for episode in episodes:
        if episode.judgement is not None:
            metrics = episode.judgement.metrics
            state.judge_tokens += metrics.get("llm_prompt_tokens", 0.0) + metrics.get("llm_completion_tokens", 0.0)
            state.judge_cost += metrics.get("llm_cost", 0.0)
    errors = {error.kind: error for error in (JudgeUnavailableError, JudgeBudgetError)}
    for episode in episodes:
        if episode.error_kind in errors:
            raise errors[episode.error_kind](episode.error or "")
    check_budget(state.judge_tokens, state.judge_cost, config.task_judge.llm)


def check_any_succeeded(episodes: Sequence[Episode]) -> None:
    """Raise BackboneError if every episode failed: a bug in workflow, judge or data, which more steps cannot fix."""
    if not any(episode.status == "ok" for episode in episodes):
        raise BackboneError(
            f"all {len(episodes)} episodes failed, so there is nothing to learn from. The first: "
            f"[{episodes[0].error_kind}] {episodes[0].error}"
        )


def write_summary(context: RunContext, state: RunState, model: str | None) -> RunSummary:
    """Write `summary.json` and return it; `model` is the folder or the name of the tuned or evaluated model."""
    config = context.config.astuner
    debug = config.backbone == "debug"
    tasks = context.run_inputs.tasks
    left_out = Counter(tasks.left_out)
    if tasks.skipped_rows:
        left_out["invalid row"] = tasks.skipped_rows
    if state.task_sampling is not None:
        left_out.update(task.cause for task in state.task_sampling.left_out.values())
    summary = state.summary(
        backbone=config.backbone,
        seed=config.debug.debug_vllm_seed if debug else config.trainer_common.seed,
        started=context.started,
        model=model,
        tasks_left_out=left_out,
    )
    context.record.write_summary(summary)
    return summary
