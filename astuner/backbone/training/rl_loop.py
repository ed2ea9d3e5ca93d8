"""The training loop, which is the same on every backbone."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

from loguru import logger

from astuner.algorithms.credit_assignment import UpdateResult, tasks_with_signal
from astuner.algorithms.registry import resolve
from astuner.backbone.base import RunContext
from astuner.backbone.training.checkpoints import RESUME_HINT, atomic_dir
from astuner.backbone.training.run_state import RunState
from astuner.backbone.training.schedule import TaskOrder
from astuner.backbone.training.session import (
    TrainingSession,
    batch_request,
    check_any_succeeded,
    check_judge,
    dry_run,
    evaluate,
    run_batch,
    run_validation,
    write_summary,
)
from astuner.config.root import AstunerConfig
from astuner.doors import through_door
from astuner.errors import BackboneError, JudgeUnavailableError, LogprobGapError, NoSignalError
from astuner.run_record.findings import RunFinding
from astuner.run_record.record import StepWriter
from astuner.run_record.summary import RunSummary
from astuner.schema import Episode, Split, Task, TokenCounts
from astuner.system.clock import timestamp
from astuner.system.signals import signals_deferred
from astuner.task_rollout.statistics import batch_metrics, success_rates, tokens_of

_NO_UPDATE = UpdateResult({}, (), signal=False)


@dataclass(frozen=True)
class _Rollout:
    """The episodes of a training step whose update is not finished.

    Attributes:
        usable: those with a reward and samples.
        tokens: the sums over their tokens.
    """

    episodes: Sequence[Episode]
    usable: Sequence[Episode]
    tokens: TokenCounts
    refills: dict[str, float]
    started: float
    ended: float


@dataclass
class RlLoop:
    """Trains a model with reinforcement learning on episodes. A resumed run continues `state`."""

    context: RunContext
    session: TrainingSession
    state: RunState = field(default_factory=RunState)
    _failed_steps: int = field(default=0, init=False)
    _writer: StepWriter = field(init=False)
    _rollout: _Rollout | None = field(default=None, init=False)
    # The (step, validated) pair of `state` in the newest checkpoint.
    _saved: tuple[int, int | None] | None = field(default=None, init=False)

    # A run that worked before is stopped after this number of consecutive steps in which every episode failed.
    _MAX_FAILED_STEPS: ClassVar[int] = 3

    @property
    def config(self) -> AstunerConfig:
        """The section `astuner` of the configuration."""
        return self.context.config.astuner

    @cached_property
    def order(self) -> TaskOrder:
        """The tasks of each step."""
        return TaskOrder.from_config(self.config, self.context.run_inputs.tasks, self.session.steps_ahead)

    @cached_property
    def total_steps(self) -> int:
        """Number of training steps in the run."""
        common = self.config.trainer_common
        return self.order.total_steps(common.total_epochs, common.total_training_steps)

    def run(self) -> RunSummary:
        """Train from the newest checkpoint, if there is one, and write the model, the plots and the summary.

        Raises:
            AstunerError: training failed, or a file cannot be written.
            NoSignalError: the run stopped early for lack of signal; model, plots and summary are written.
            KeyboardInterrupt: the run was interrupted; a checkpoint is written.
        """
        self.context.record.expect_steps(self.total_steps)
        self._restore()
        self.session.use_order(self.order)
        with StepWriter(self.context.record) as self._writer:
            try:
                self._train()
            except KeyboardInterrupt:
                with signals_deferred():
                    self._save_interrupted()
                raise
            except NoSignalError:
                self._finish()
                raise
            return self._finish()

    def _restore(self) -> None:
        with self.context.phase("load_model"):
            progress = self.session.load()
        if progress is None:
            # A checkpoint that was there when the record was opened may have been removed since.
            self.context.record.truncate_after(-1)
            return
        state = self.state = RunState.load(progress)
        if self.order.sampler is not None and state.task_sampling is not None:
            self.order.sampler.restore(state.task_sampling)
        # The run may have been killed after a validation that followed the checkpoint.
        self.context.record.truncate_after(state.step, -1 if state.validated is None else state.validated)
        self._saved = (state.step, state.validated)
        logger.info("resuming from the checkpoint of step {}", state.step)

    def _train(self) -> None:
        state, save_freq = self.state, self.config.trainer_common.save_freq
        self.prepare()
        if state.step < self.total_steps:
            logger.info("training: {} steps, {} of them done", self.total_steps, state.step)
        with self.context.progress.bar("training", self.total_steps, done=state.step, unit="steps") as advance:
            self._validate_if_due()  # the run may have been interrupted in this validation
            while state.step < self.total_steps:
                note = self.train_step(state.step + 1)
                self._writer.when_written(partial(advance, note=note))
                self._validate_if_due()
                if state.step % save_freq == 0 or state.step == self.total_steps:
                    self._save()
        if state.validated != state.step:
            self.validate("validation after")
        state.after = state.latest

    def prepare(self) -> None:
        """Sync the engine's weights, and validate the starting model."""
        state = self.state
        with self.context.phase("sync_weights"):
            self.session.sync(state.step)
        if self.config.trainer_common.val_before_train and state.step == 0:
            self.validate("validation before")
            state.before = state.latest

    def train_step(self, step: int) -> str:
        """Do training step `step` (1-based) and return a note for the progress."""
        context, session = self.context, self.session
        if self._rollout is None:  # otherwise, a signal has interrupted the wait for the update
            started = timestamp()
            episodes, refills = self._roll_out(step)
            with signals_deferred():
                self._rollout = self._begin_step(step, episodes, refills, started)
        rollout = self._rollout
        n_samples = sum(len(episode.samples) for episode in rollout.usable)
        with context.progress.bar(f"{self._step_name(step)}: update", n_samples, unit="samples"):
            session.wait_for_update(step)
            # Weights, counters and record change together, so that a checkpoint is always consistent.
            with signals_deferred():
                result = _NO_UPDATE
                if rollout.usable:
                    with context.phase("update"):
                        result = self._update(rollout.usable, step)
                # Without an update, too: the weights are those after this step.
                with context.phase("sync_weights"):
                    session.sync(step)
                metrics = self._end_step(step, rollout, result)
                self._rollout = None
        try:
            check_judge(self.config, self.state, rollout.episodes)
        except JudgeUnavailableError:
            self._save()
            raise
        self._check_signal(result.signal, any_usable=bool(rollout.usable))
        note = f"reward {metrics['reward/mean']:.2f}, success {metrics['success/rate']:.0%}"
        return f"{note}, {len(rollout.episodes)} episodes" if rollout.refills else note

    def _begin_step(
        self, step: int, episodes: Sequence[Episode], refills: dict[str, float], started: float
    ) -> _Rollout:
        """Record the episodes of a step before its update, because they explain an update that fails."""
        ended = timestamp()
        usable = [episode for episode in episodes if episode.status == "ok"]
        self._failed_steps = 0 if usable else self._failed_steps + 1
        tokens = [tokens_of([episode]) for episode in episodes]
        self._writer.begin_step(step, list(zip(episodes, tokens, strict=True)))
        self.context.monitor.check_rollout(step, episodes)
        if not usable and (self.state.totals.ok == 0 or self._failed_steps == self._MAX_FAILED_STEPS):
            self._save()
            check_judge(self.config, self.state, episodes)
            check_any_succeeded(episodes)
        return _Rollout(episodes, usable, sum(tokens, TokenCounts()), refills, started, ended)

    def _end_step(self, step: int, rollout: _Rollout, result: UpdateResult) -> dict[str, float]:
        state, writer, episodes = self.state, self._writer, rollout.episodes
        state.step = step
        state.totals.add(episodes, rollout.tokens)
        metrics = (
            batch_metrics(episodes, rollout.tokens)
            | result.metrics
            | self.end_task_step(step, success_rates(episodes))
            | rollout.refills
            | {"time/rollout": rollout.ended - rollout.started, "time/update": timestamp() - rollout.ended}
        )
        ids = [episode.episode_id for episode in rollout.usable]
        advantages = dict(zip(ids, result.advantages, strict=False))
        updates = dict(zip(ids, result.samples, strict=False))
        metrics |= {"time/record": writer.seconds_waited(), "time/step": timestamp() - rollout.started}
        writer.end_step(step, metrics, advantages, updates)
        return metrics

    def _roll_out(self, step: int) -> tuple[list[Episode], dict[str, float]]:
        """Run the episodes of a step.

        With `dynamic_sampling: refill`, further tasks follow while the step has fewer groups with a learning signal
        than its batch has tasks: Yu et al., "DAPO", arXiv:2503.14476, section 3.2.
        """
        tasks = list(self.order.batch(step))
        episodes = self._run_tasks(tasks, step, "rollout")
        settings = self.config.trainer_common.algorithm
        # If every episode fails, further ones fail, too.
        if settings.dynamic_sampling != "refill" or all(episode.status != "ok" for episode in episodes):
            return episodes, {}
        assert self.order.sampler is not None  # refills need it
        size, refills = len(tasks), 0
        missing = size - self._count_groups(episodes)
        while missing > 0 and refills < settings.max_refills:
            further = self.order.sampler.further_tasks(missing, tasks)
            if not further:
                break
            refills += 1
            tasks += further
            episodes += self._run_tasks(further, step, f"refill {refills}")
            missing = size - self._count_groups(episodes)
        if missing > 0:
            why = "max_refills is reached" if refills == settings.max_refills else "there are no further tasks"
            logger.info("step {}: {} of {} groups have a learning signal, and {}", step, size - missing, size, why)
        return episodes, {
            "refill/batches": refills,
            "refill/tasks": len(tasks) - size,
            "refill/missing_groups": missing,
        }

    def _run_tasks(self, tasks: Sequence[Task], step: int, name: str) -> list[Episode]:
        request = batch_request(self.config, tasks, self.config.rollout.num_repeat, "train", step)
        return run_batch(self.context, self.state, self.session.roll_out, request, f"{self._step_name(step)}: {name}")

    def _count_groups(self, episodes: Sequence[Episode]) -> int:
        usable = [episode for episode in episodes if episode.status == "ok"]
        return len(tasks_with_signal(self.config, resolve(self.config.trainer_common.algorithm), usable))

    def _step_name(self, step: int) -> str:
        return f"step {step}/{self.total_steps}"

    def end_task_step(self, step: int, rates: Mapping[str, float]) -> dict[str, float]:
        """Give a step's success rates to the sampler of the next steps' tasks, and return the sampler's metrics."""
        sampler = self.order.sampler
        if sampler is None:
            return {}
        sampler.record(step, rates)
        self.session.record_success(step, rates)
        self.state.task_sampling = sampler.state()
        return sampler.metrics()

    def _update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        session, monitor = self.session, self.context.monitor
        try:
            result = session.update(episodes, step)
        except LogprobGapError as error:
            self.context.record.write_finding(RunFinding(step, "logprob_gap", "error", error.text, error.fix))
            raise
        ids = [episode.episode_id for episode in episodes]
        advantages = dict(zip(ids, result.advantages, strict=False))
        samples = dict(zip(ids, result.samples, strict=False))
        monitor.check_update(result.metrics, advantages, samples, session.compute_dtype)
        return result

    def validate(self, title: str) -> None:
        """Measure the model on the validation tasks, if there are any, behind a progress bar named `title`."""
        self._writer.flush()  # the metrics of the step precede those of its validation
        run_validation(self.context, self.session, self.state, title)

    def _validate_if_due(self) -> None:
        state = self.state
        due = 0 < state.step < self.total_steps and state.step % self.config.trainer_common.test_freq == 0
        if due and state.validated != state.step:
            self.validate(f"validation, step {state.step}")

    def _check_signal(self, signal: bool, *, any_usable: bool) -> None:
        """Warn, or stop the run, when a step has no learning signal."""
        state, common = self.state, self.config.trainer_common
        state.steps_without_signal = 0 if signal else state.steps_without_signal + 1
        if signal:
            return
        steps = state.steps_without_signal
        if steps < common.no_signal_patience:
            why = "all episodes of a task have the same reward" if any_usable else "no episode can be trained on"
            logger.warning("step {}: {}, so there is nothing to learn", state.step, why)
            return
        reason = (
            f"{steps} consecutive steps had no learning signal: every task is always solved or never, or its episodes "
            "fail. Use easier or harder tasks, more rollout.num_repeat, a higher rollout.temperature, or a reward with "
            "more than two values"
        )
        if common.stop_on_no_signal:
            raise NoSignalError(f"{reason} (trainer_common.stop_on_no_signal)")
        logger.warning("{}", reason)

    def _save(self) -> None:
        """Write a checkpoint of the finished steps, unless the newest one has this state. Defers signals."""
        state, context = self.state, self.context
        current = (state.step, state.validated)
        if state.step == 0 or self._saved == current:
            return
        self._writer.flush()  # a resumed run does not repeat the steps of its checkpoint
        context.record.check_in_place()
        with signals_deferred(), context.phase("save_checkpoint"):
            if self.session.save(state.step, state.dump(context.started)):
                self._saved = current

    def _save_interrupted(self) -> None:
        """Finish the steps whose update has started, and save the last one."""
        try:
            last = self.session.end_training(self.state.step)
            if last == 0:
                logger.warning("interrupted: no step was finished, so there is nothing to resume")
                return
            logger.warning("interrupted: saving step {}", last)
            for step in range(self.state.step + 1, last + 1):
                with contextlib.suppress(NoSignalError, JudgeUnavailableError):  # the run ends in any case
                    self.train_step(step)
                if self.state.step < step:
                    break  # its episodes have no reward
            self._save()
        except BackboneError as error:  # for example, the signal has ended the trainer, too
            logger.error("interrupted, and the last step cannot be saved: {}", error)
        if self._saved is None:
            logger.warning("no checkpoint was saved, so this run cannot be resumed")
        else:
            logger.warning("run the same command again to resume from the checkpoint of step {}", self._saved[0])

    def _finish(self) -> RunSummary:
        context = self.context
        self._writer.flush()
        context.record.check_in_place()
        model, advice = context.record.folder / "model", f"Fix this first. {RESUME_HINT}."
        with context.phase("save_checkpoint"), atomic_dir(model, "the tuned model", advice) as folder:
            self.session.save_model(folder, self.state.step)
        through_door("record", "plots")(context.record.folder)
        return write_summary(context, self.state, str(model))


class SessionBackbone(ABC):
    """A `TrainingBackbone` whose runs use one training session each."""

    @abstractmethod
    def session(self, context: RunContext, *, trains: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the session of a run; `trains` is False for an evaluation and a dry run."""

    def train(self, context: RunContext) -> RunSummary:
        """Train with the configured algorithm, and write the tuned model to `{record}/model`."""
        supervised = context.config.astuner.is_supervised
        loop: type[RlLoop] = through_door("loop", "supervised") if supervised else RlLoop
        with self.session(context, trains=True) as session:
            return loop(context, session).run()

    def evaluate(self, context: RunContext) -> RunSummary:
        """Validate the model once."""
        with self.session(context, trains=False) as session:
            return evaluate(context, session)

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks."""
        with self.session(context, trains=False) as session:
            session.sync(0)
            return dry_run(context, session.roll_out, split)
