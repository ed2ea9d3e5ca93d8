"""The local backbone's session: a policy in this process, and an embedded engine that samples from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from astuner.backbone.batch import Batch, run_batch
from astuner.backbone.local.policy import Policy
from astuner.backbone.session import Session
from astuner.llm_engine.embedded import EmbeddedEngine
from astuner.task_rollout import BatchRequest, TaskRollout


@dataclass
class LocalSession(Session):
    """A policy with an engine that samples from it.

    Attributes:
        context: the run.
        state: counters.
        policy: the model.
    """

    policy: Policy

    @cached_property
    def engine(self) -> EmbeddedEngine:
        """The engine, started on first use with the policy's weights of then."""
        with self.context.phase("load_model"):
            engine = EmbeddedEngine(
                self.policy.frozen_copy(),
                max_model_len=min(self.config.rollout.max_model_len, self.policy.max_length),
                max_num_seqs=self.config.rollout.max_num_seqs,
            )
        self.sync_weights(engine, self.state.step)
        return engine

    def sync_weights(self, engine: EmbeddedEngine, version: int) -> None:
        """Have `engine` sample from the policy's weights of now, as that version."""
        with self.context.phase("sync_weights"):
            engine.update_weights(self.policy.full_weights(), version)

    @cached_property
    def rollout(self) -> TaskRollout:
        """What runs episodes."""
        return self.ingredients.rollout(self.config, self.engine, self.context.running)

    def roll_out(self, request: BatchRequest, name: str) -> Batch:
        """Run the episodes in threads of this process."""
        batch = run_batch(self.context, self.rollout, request, name)
        self.engine.raise_if_broken()
        return batch

    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, adapters merged in."""
        self.policy.save(folder, self.ingredients.codec)

    def close(self) -> None:
        """Stop the engine and the episode threads, where they were started."""
        if "rollout" in self.__dict__:
            self.rollout.close()
        if "engine" in self.__dict__:
            self.engine.close()
