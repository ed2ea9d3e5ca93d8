"""The local backbone: everything in one process, on a CPU or one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from astuner.backbone.algorithms import resolve
from astuner.backbone.base import MemoryEstimate, Prospect, RunContext
from astuner.backbone.batch import dry_run
from astuner.backbone.causal_lm import choose_device
from astuner.backbone.finish import leave_summary, run_to_end
from astuner.backbone.local.checkpoint import Checkpoints
from astuner.backbone.local.estimate import estimate_memory
from astuner.backbone.local.loop import LocalLoop, LocalReinforcementLoop
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.session import LocalSession
from astuner.backbone.local.supervised import SupervisedLoop
from astuner.backbone.progress_state import RunState
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.model_tuner import first_line
from astuner.run_record import RunSummary
from astuner.schema import Episode
from astuner.task_rollout import Split

NAME = "local"


class LocalBackbone:
    """Trains with PyTorch in this process, sampling from the embedded engine."""

    def train(self, context: RunContext) -> RunSummary:
        """Run the configured algorithm and leave the tuned model in `{record}/model`."""
        common = context.config.astuner.trainer_common
        algorithm = resolve(common.algorithm)
        checkpoints = Checkpoints(context.record.folder / "checkpoints", common.max_checkpoints_to_keep)
        with _session(context) as session:
            kind = SupervisedLoop if algorithm.rule is None else LocalReinforcementLoop
            loop: LocalLoop = kind(session, algorithm, checkpoints)
            return run_to_end(loop, NAME)

    def evaluate(self, context: RunContext) -> RunSummary:
        """Validate once."""
        with _session(context) as session:
            session.validate("validation")
        session.state.after = session.state.latest
        return leave_summary(session, NAME, session.ingredients.model_path)

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks."""
        with _session(context) as session:
            batch = dry_run(context, session.rollout, split, context.config.astuner.trainer_common.seed)
            session.engine.raise_if_broken()
        return batch.episodes

    def refuse(self, prospect: Prospect) -> None:
        """Refuse nothing: the configuration's own checks know all of it."""

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate:
        """Estimate from shapes."""
        return estimate_memory(config, model_path)


@contextlib.contextmanager
def _session(context: RunContext) -> Iterator[LocalSession]:
    """Load what a run of episodes needs, and stop it afterwards."""
    config = context.config.astuner
    torch.manual_seed(config.trainer_common.seed)
    with _memory_named(config):
        device = choose_device(config.trainer_common.device)
        with context.phase("load_model"):
            policy = Policy(config.model, context.ingredients.model_path, device, config.update.pack)
        session = LocalSession(context, RunState(), policy)
        try:
            yield session
        finally:
            session.close()


@contextlib.contextmanager
def _memory_named(config: AstunerConfig) -> Iterator[None]:
    """Turn PyTorch's errors about memory into one that says what takes less of it.

    Raises:
        BackboneError: there was not enough memory.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; for the CPU there is no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        tokens = config.trainer_common.max_tokens_per_micro_batch
        raise BackboneError(
            f"out of memory: {first_line(error)}. Lower trainer_common.max_tokens_per_micro_batch ({tokens}) or "
            "rollout.max_num_seqs, set model.gradient_checkpointing, or train adapters (model.lora.rank: 16); "
            "`astuner check` estimates what each part takes"
        ) from error
