"""How a run ends, whatever trained it: its model, its plots and its summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from astuner.backbone.checkpoint_folder import write_model
from astuner.backbone.session import Session
from astuner.run_record import RunSummary, plot_run


def leave_summary(session: Session, backbone: str, model: str) -> RunSummary:
    """Write `summary.json` and return it.

    Args:
        session: whose state it tells.
        backbone: its name.
        model: what was tuned or measured.
    """
    context = session.context
    summary = session.state.summary(
        backbone=backbone, seed=session.config.trainer_common.seed, started=context.started, model=model
    )
    context.record.write_summary(summary)
    return summary


def finish_training(session: Session, backbone: str, save_model: Callable[[Path], None]) -> RunSummary:
    """Leave the model, the plots and the summary of a run that has trained.

    Args:
        session: what has been trained.
        backbone: its name.
        save_model: writes the model into the folder that it is given.

    Raises:
        RecordError: the model cannot be written.
    """
    context = session.context
    with context.phase("save_checkpoint"):
        model = write_model(context.record.folder / "model", save_model)
    plot_run(context.record.folder)
    return leave_summary(session, backbone, str(model))
