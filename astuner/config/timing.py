"""Sections on the timing of a run: `asynchrony`, `deadlines`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from astuner.config.section import (
    FOR_SFT,
    TRAINING,
    Condition,
    Count,
    Seconds,
    Section,
    from_run,
    key,
    mirrors,
    sets,
    unsupported,
)

Deadline = Seconds | None
_NO_OVER_ROLLOUT = Condition(
    "while asynchrony.over_rollout is 0", lambda run: run.backbone == "trinity" and run.asynchrony.over_rollout == 0
)


class AsynchronyConfig(Section):
    """`asynchrony`: how far sampling may run ahead of training (trinity).

    A token's staleness is the number of training steps between the weights that sampled it and the weights that it
    trains.
    """

    sync_style: Literal["explorer_driven", "trainer_driven", "fully_async", "fixed"] = key(
        "explorer_driven",
        trinity=sets("synchronizer.sync_style") + sets("buffer.explorer_input.eval_tasksets", rule="requested_tasks"),
        unsupported=unsupported(
            "fixed",
            by=("trinity",),
            why="sampler and trainer then count steps separately, and wait for each other forever once a step "
            "yields fewer samples than expected; write explorer_driven, which with sync_interval: 1 samples each "
            "step with the newest weights",
        ),
    )
    """Who requests new weights: explorer_driven (the sampler), trainer_driven, or fully_async (also within a step)."""
    sync_interval: Count = key(
        1,
        trinity=sets("synchronizer.sync_interval")
        + sets("synchronizer.trainer_sync_interval", rule="updates_between_syncs")
        + sets("explorer.max_inflight_batches", rule="batches_in_flight"),
    )
    """Training steps between two syncs of the weights."""
    max_staleness: Annotated[int, Field(ge=0, le=100_000)] = key(
        1,
        trinity=sets("explorer.max_inflight_batches", rule="batches_in_flight")
        + mirrors("algorithm.policy_loss_fn_args", rule="loss_args"),
    )
    """Maximum staleness; sampling waits before it would be larger. 0 is synchronous training."""
    over_rollout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        trinity=sets("explorer.over_rollout.ratio") + from_run("explorer.runner_per_model", rule="runners"),
    )
    """Fraction of a step's tasks that the step need not wait for; the slowest are dropped and counted."""
    over_rollout_wait: Seconds = key(
        30.0, no_effect=(_NO_OVER_ROLLOUT,), trinity=sets("explorer.over_rollout.wait_after_min")
    )
    """Seconds to wait for these tasks after the others are done."""
    stall_timeout: Seconds = key(1800.0, trinity="ends the run", resume="any")
    """Seconds without a finished episode or training step after which the run ends with an error."""


class DeadlinesConfig(Section):
    """`deadlines`: seconds after which the log reports a phase that still runs, and the interval of later reports.

    The report names the phase, the running episodes with their last LLM calls, and the Python stacks. No phase is
    ended, except load_model, validation, sync_weights and save_checkpoint if Trinity's processes do not answer. null is
    no deadline. (Episodes and judges have their own limits, which do end them: rollout.episode_timeout and
    task_judge.timeout.)
    """

    read_tasks: Deadline = 600.0
    """Reading the tasks, the workflow and the tokenizer."""
    load_model: Deadline = 1800.0
    """Loading the model, or the checkpoint to continue from."""
    rollout: Deadline = key(7200.0, no_effect=(FOR_SFT,))
    """The episodes of one training step, or of a debug run."""
    update: Deadline = key(7200.0, used_by=TRAINING)
    """The update of the weights in one step."""
    sync_weights: Deadline = key(900.0, used_by=TRAINING, no_effect=(FOR_SFT,))
    """Transferring the weights to the inference engine."""
    validation: Deadline = 14400.0
    """One validation."""
    save_checkpoint: Deadline = key(1800.0, used_by=TRAINING)
    """Writing a checkpoint, or the tuned model."""
