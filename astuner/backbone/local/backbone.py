"""The local backbone: rollout and training in one process, on a CPU or one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from astuner.algorithms import resolve
from astuner.backbone.base import MemoryEstimate, PreflightContext, RunContext
from astuner.backbone.local.determinism import deterministic_operations
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.session import LocalSession
from astuner.backbone.ray_cluster.started import StartedRay
from astuner.backbone.training.rl_loop import RlLoop
from astuner.backbone.training.run_inputs import RunInputs
from astuner.backbone.training.session import dry_run, evaluate
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.doors import through_door
from astuner.errors import BackboneError, first_line
from astuner.llm_engine.causal_lm import choose_device
from astuner.run_record.summary import RunSummary
from astuner.schema import Episode
from astuner.task_rollout import Split


class LocalBackbone:
    """Trains with PyTorch in this process and samples with the embedded engine."""

    def train(self, context: RunContext) -> RunSummary:
        """Train with the configured algorithm, and write the tuned model to `{record}/model`."""
        supervised = resolve(context.config.astuner.trainer_common.algorithm).rule is None
        with _local_session(context) as session:
            loop = through_door("loop", "supervised") if supervised else RlLoop
            summary: RunSummary = loop(context, session).run()
            return summary

    def evaluate(self, context: RunContext) -> RunSummary:
        """Validate the model once."""
        with _local_session(context) as session:
            return evaluate(context, session)

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks."""
        with _local_session(context) as session:
            session.sync(0)
            return dry_run(context, session.roll_out, split)

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Do nothing: this backbone uses no other service, so that `preflight` checks everything."""

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check nothing: the checks of the configuration cover this backbone."""

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate a run's memory from the model's shape."""
        estimate: MemoryEstimate = through_door("memory", "local")(config, run_inputs)
        return estimate


@contextlib.contextmanager
def _local_session(context: RunContext) -> Iterator[LocalSession]:
    """Load the policy, and close the session after the block.

    Raises:
        BackboneError: the device ran out of memory.
    """
    config = context.config.astuner
    with reported_memory_errors(config), contextlib.ExitStack() as stack:
        device = choose_device(config.trainer_common.device)
        if config.trainer_common.deterministic:
            stack.enter_context(deterministic_operations(device))
        torch.manual_seed(config.trainer_common.seed)
        with context.phase("load_model"):
            policy = Policy(config.model, context.run_inputs.model_path, device, config.update.pack)
        yield stack.enter_context(contextlib.closing(LocalSession(context, policy)))


@contextlib.contextmanager
def reported_memory_errors(config: AstunerConfig) -> Iterator[None]:
    """Add to the block's out-of-memory errors the keys that reduce memory use.

    Raises:
        BackboneError: the device ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        # torch.OutOfMemoryError is a RuntimeError; for the CPU there is no class.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        tokens = config.trainer_common.max_tokens_per_micro_batch
        raise BackboneError(
            f"out of memory: {first_line(error)}. Lower trainer_common.max_tokens_per_micro_batch ({tokens}) or "
            "rollout.max_num_seqs, set model.gradient_checkpointing, or train adapters (model.lora.rank: 16); "
            "`astuner check` estimates the memory of each part"
        ) from error
