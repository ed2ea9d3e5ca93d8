"""The local backbone as the reference for verl's workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from astuner.algorithms.credit_assignment import UpdateResult
from astuner.algorithms.distillation.distiller import Distiller
from astuner.algorithms.registry import resolve
from astuner.config.model import ModelConfig
from astuner.config.root import RunConfig
from astuner.schema import Episode
from tests.backbone.verl.clusters import TOTAL_STEPS

COMPUTED = "update/computed_per_distinct_token"
Weights = dict[str, torch.Tensor]


@dataclass
class LocalReference:
    """A policy of the local backbone."""

    policy: Any

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token; 0 for the first."""
        from astuner.backbone.local.forward import token_logprobs

        mask = torch.tensor([[0] + [1] * (len(ids) - 1)])
        with torch.no_grad():
            return token_logprobs(self.policy.model, torch.tensor([ids]), mask, 1.0)[0][0].tolist()

    def step(
        self, config: RunConfig, episodes: list[Episode], distiller: Distiller | None = None
    ) -> tuple[UpdateResult, Weights]:
        """Do the first training step, and return its result and the new weights.

        The result lacks `update/changed_weights` and `update/cpu_threads`, which only the local backbone measures, and
        the number of computed tokens, which depends on the micro-batches.
        """
        from astuner.backbone.local.policy import Optimizer
        from astuner.backbone.local.update import PolicyUpdate

        run = config.astuner
        optimizer = Optimizer(self.policy.trainable(), run.trainer_common.optim, TOTAL_STEPS)
        algorithm = resolve(run.trainer_common.algorithm)
        update = PolicyUpdate(run, algorithm, self.policy, optimizer, distiller=distiller)
        result = update.step(episodes, 1)
        metrics = dict(result.metrics)
        assert metrics.pop("update/changed_weights") > 0.0
        assert metrics.pop("update/cpu_threads") >= 1
        assert metrics.pop(COMPUTED) >= 1
        return replace(result, metrics=metrics), {
            name: value.clone() for name, value in self.policy.model.state_dict().items()
        }


def local_reference(folder: Path) -> LocalReference:
    from astuner.backbone.local.policy import Policy

    return LocalReference(Policy(ModelConfig(), str(folder), torch.device("cpu"), "leaf"))


def saved_weights(trainer: Any, folder: Path) -> Weights:
    from transformers import AutoModelForCausalLM

    trainer.save_model(folder, "float32")
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()
