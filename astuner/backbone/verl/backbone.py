"""The verl backbone: verl's workers and engines on a Ray cluster, astuner's episodes, algorithms and record."""

from __future__ import annotations

from astuner.backbone.algorithms import resolve
from astuner.backbone.base import MemoryEstimate, Prospect, RunContext
from astuner.backbone.batch import dry_run
from astuner.backbone.finish import leave_summary, run_to_end
from astuner.backbone.verl.session import refuse_unfit, verl_session
from astuner.config.root import AstunerConfig
from astuner.run_record import RunSummary
from astuner.schema import Episode
from astuner.task_rollout import Split

NAME = "verl"


class VerlBackbone:
    """Trains with verl, on one machine or many."""

    def train(self, context: RunContext) -> RunSummary:
        """Run the configured algorithm and leave the tuned model in `{record}/model`."""
        common = context.config.astuner.trainer_common
        algorithm = resolve(common.algorithm)
        with verl_session(context) as session:
            # What it needs is imported only once the environment is set up.
            from astuner.backbone.verl.checkpoint import VerlCheckpoints
            from astuner.backbone.verl.loop import VerlLoop

            checkpoints = VerlCheckpoints(context.record.folder / "checkpoints", common.max_checkpoints_to_keep)
            return run_to_end(VerlLoop(session, algorithm, checkpoints), NAME)

    def evaluate(self, context: RunContext) -> RunSummary:
        """Validate once."""
        with verl_session(context) as session:
            session.sync()
            session.validate("validation")
            session.state.after = session.state.latest
            return leave_summary(session, NAME, session.ingredients.model_path)

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks."""
        with verl_session(context) as session:
            session.sync()
            batch = dry_run(context, session.fleet, split, context.config.astuner.trainer_common.seed)
            session.refuse_lost_engines()
        return batch.episodes

    def refuse(self, prospect: Prospect) -> None:
        """Refuse what verl, its engine or the Ray to join does not take.

        Raises:
            AstunerError: what, and what to do.
        """
        refuse_unfit(prospect)

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate | None:
        """Return None: the model is in verl's workers and engines, on machines that this process may not see."""
        return None
