"""How a run ends, whatever trained it: its model, its plots and its summary."""

from __future__ import annotations

from astuner.backbone.checkpoint_folder import write_model
from astuner.backbone.loop import TrainingLoop
from astuner.backbone.session import Session
from astuner.errors import NoSignalError
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


def run_to_end(loop: TrainingLoop, backbone: str) -> RunSummary:
    """Train, and leave the model, the plots and the summary, also of a run that came to an end of no use.

    Args:
        loop: not begun.
        backbone: its name.

    Raises:
        AstunerError: as `TrainingLoop.run`.
        RecordError: the model cannot be written.
    """
    try:
        loop.run()
    except NoSignalError:
        _finish(loop.session, backbone)
        raise
    return _finish(loop.session, backbone)


def _finish(session: Session, backbone: str) -> RunSummary:
    context = session.context
    with context.phase("save_checkpoint"):
        model = write_model(context.record.folder / "model", session.save_model)
    plot_run(context.record.folder)
    return leave_summary(session, backbone, str(model))
