"""The trinity backbone: Trinity's explorer and trainer on a Ray cluster, astuner's episodes, algorithms and record."""

from __future__ import annotations

from astuner.backbone.algorithms import resolve
from astuner.backbone.base import MemoryEstimate, Prospect, RunContext
from astuner.backbone.batch import dry_run
from astuner.backbone.finish import leave_summary, run_to_end
from astuner.backbone.trinity.checkpoint import TrinityCheckpoints
from astuner.backbone.trinity.session import AskedFor, refuse_unfit, trinity_session
from astuner.config.root import AstunerConfig
from astuner.run_record import RunSummary
from astuner.schema import Episode
from astuner.task_rollout import Split

NAME = "trinity"


class TrinityBackbone:
    """Trains with Trinity-RFT: episodes are run while the weights learn from those before."""

    def train(self, context: RunContext) -> RunSummary:
        """Run the configured algorithm and leave the tuned model in `{record}/model`."""
        common = context.config.astuner.trainer_common
        checkpoints = TrinityCheckpoints(context.record.folder / "checkpoints", common.max_checkpoints_to_keep)
        with trinity_session(context, "both", checkpoints) as session:
            # What it needs is imported only once the environment is set up.
            from astuner.backbone.trinity.loop import TrinityLoop

            return run_to_end(TrinityLoop(session, resolve(common.algorithm), checkpoints), NAME)

    def evaluate(self, context: RunContext) -> RunSummary:
        """Validate once."""
        with trinity_session(context, "bench") as session:
            session.validate("validation")
            session.state.after = session.state.latest
            return leave_summary(session, NAME, session.ingredients.model_path)

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks."""
        with trinity_session(context, "bench") as session:
            batch = dry_run(context, AskedFor(session), split, context.config.astuner.trainer_common.seed)
        return batch.episodes

    def refuse(self, prospect: Prospect) -> None:
        """Refuse what Trinity or the Ray to join does not take.

        Raises:
            AstunerError: what, and what to do.
        """
        refuse_unfit(prospect)

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate | None:
        """Return None: the model is in other processes, on machines that this one may not see."""
        return None
