"""How a run ends, whatever trained it: its plots and its summary."""

from __future__ import annotations

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


def finish_training(session: Session, backbone: str, model: str) -> RunSummary:
    """Leave the plots and the summary of a run that has trained."""
    plot_run(session.context.record.folder)
    return leave_summary(session, backbone, model)
