"""Section `deadlines`: how long each phase of a run may take before the log says where it stands."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from astuner.config.section import Section

Seconds = Annotated[float, Field(gt=0)] | None


class DeadlinesConfig(Section):
    """`deadlines`: seconds after which a phase that still runs is told of in the log, and again each time as long.

    The log then names the phase, the episodes that run with their last LLM calls, and the Python stacks. No phase is
    ended, but load_model, validation, sync_weights and save_checkpoint where Trinity's processes do not answer. null is
    no deadline. (Episodes and judges have their own, which do end them: rollout.episode_timeout and
    task_judge.timeout.)
    """

    read_tasks: Seconds = 600.0
    """Reading the tasks, the workflow and the tokenizer."""
    load_model: Seconds = 1800.0
    """Loading the model, or a checkpoint to go on from."""
    rollout: Seconds = 7200.0
    """The episodes of one training step, or of a debug run."""
    update: Seconds = 7200.0
    """The update of the weights in one step."""
    sync_weights: Seconds = 900.0
    """Handing the weights to the inference engine."""
    validation: Seconds = 14400.0
    """One validation."""
    save_checkpoint: Seconds = 1800.0
    """Writing a checkpoint, or the tuned model."""
